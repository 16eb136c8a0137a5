"""Forward and backward of the whole layer, out of a routing's launches, the experts' and the sums to tokens.

Legend: T tokens, K experts a token, E experts, R = T·K rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.grouped_lora_mlp import compute
from shardwright.kernels.grouped_lora_mlp.admit import check, learns_base
from shardwright.kernels.grouped_lora_mlp.layer import Choice, Gradients, Held, Kept, Wants, Weights
from shardwright.kernels.grouped_lora_mlp.rows import Rows
from shardwright.kernels.moe_layer import configs, contract
from shardwright.kernels.moe_layer.triton import weight_grad_kernel
from shardwright.kernels.permute.configs import most_tiles
from shardwright.kernels.permute.op import launch_combine
from shardwright.kernels.permute.route import launch_route
from shardwright.kernels.permute.tiles import Tiles, tile_buffer_size

ADMITTED = Admitted()


@dataclass(frozen=True)
class Index:
    """A routing as three saved tensors: tile buffer, entry of each row, row of each entry."""

    buffer: Tensor
    entry: Tensor
    place: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.buffer, self.entry, self.place

    def rows(self, experts: int, token: object | None) -> Rows:
        R = self.entry.shape[0]
        tiles = Tiles(self.buffer, experts, most_tiles(R, experts))
        return Rows(R, tiles, self.entry, self.place.shape[1], token)

    @staticmethod
    def shapes(ids: Tensor, experts: int) -> Index:
        """Tensors of the shapes that a routing of these ids has."""
        R = ids.shape[0] * ids.shape[1]
        buffer = ids.new_empty(tile_buffer_size(R, experts), dtype=torch.int32)
        return Index(buffer, ids.new_empty(R, dtype=torch.int32), torch.empty_like(ids, dtype=torch.int32))


@dataclass
class Started:
    """A forward before its down product."""

    index: Index
    rows: Rows
    half: compute.Half
    weights: Tensor
    token: object | None


def run_forward(
    choice: Choice, w: Weights, x: Tensor, ids: Tensor, weights: Tensor, keep: bool
) -> tuple[Tensor, Index, Kept, object | None]:
    """``out [T, H]``, the routing's index, what is kept for the backward, and the layout's token."""
    started, out = start_forward(choice, w, x, ids, weights, keep), torch.empty_like(x)
    end_forward(choice, w, started, out)
    return out, started.index, started.half.kept, started.token


def start_forward(choice: Choice, w: Weights, x: Tensor, ids: Tensor, weights: Tensor, keep: bool) -> Started:
    """Everything that a backward needs."""
    E = w.gate_up.shape[0]

    def guards() -> None:
        check(x, None, w, choice, op=contract.NAME)
        contract.check_routing(x, ids, weights, E, interpreted=device.interpreted())

    token = ADMITTED.check((x, ids, weights, *w.tensors()), (choice, learns_base(w)), guards)
    routing = launch_route(ids, E, token)
    rows = Rows(routing.rows, routing.tiles, routing.entry, ids.shape[1], token)
    half = compute.first_half(choice, w, x, rows, keep)
    return Started(Index(routing.tiles.buffer, routing.entry, routing.place), rows, half, weights, token)


def end_forward(choice: Choice, w: Weights, started: Started, out: Tensor) -> None:
    """Fill ``out [T, H]``."""
    y = compute.second_half(choice, w, started.half, started.rows, out.shape[1])
    launch_combine(y, started.index.place, started.weights, out, key_of(started.token, "combine"))


def run_backward(
    choice: Choice,
    w: Weights,
    held: Held,
    weights: Tensor,
    index: Index,
    dout: Tensor,
    wants: Wants,
    token: object | None = None,
) -> tuple[Tensor | None, Tensor | None, Gradients]:
    """``dx [T, H]``, ``dweights [T, K]``, and the gradients of what learns in the layer."""
    rows = index.rows(w.gate_up.shape[0], token)
    dout = dout.contiguous()
    found = compute.backward(choice, w, held, rows, dout, weights, wants)
    dweights = None if found.part is None else torch.empty_like(weights)
    if found.dx is None:
        if found.part is not None and dweights is not None:
            launch_weight_grad(found.part, index.place, dweights, token)
        return None, dweights, found
    dx = torch.empty_like(dout)
    key = key_of(token, "combine-dx", dweights is None)
    launch_combine(found.dx, index.place, None, dx, key, part=found.part, dweights=dweights)
    return dx, dweights, found


def launch_weight_grad(part: Tensor, place: Tensor, dweights: Tensor, token: object | None) -> None:
    """Fill ``dweights [T, K]`` from rows' shares where no sum to tokens carries them."""
    N = dweights.numel()
    tensors, key = (part, place, dweights), key_of(token, "weight-grad")
    if N == 0 or again(key, tensors):
        return
    with device.current(dweights):
        start(
            key,
            tensors,
            weight_grad_kernel,
            (-(-N // configs.WEIGHT_ENTRIES),),
            *tensors,
            N,
            BLOCK=configs.WEIGHT_ENTRIES,
            num_warps=configs.WEIGHT_WARPS,
        )
