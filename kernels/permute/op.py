"""Permute and combine as torch functions: a routing's metadata, rows by expert, weighted sum to tokens.

Nothing here waits for the device: counts stay in device memory.

Legend: T tokens, K experts a token, E experts, R = T·K rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.permute import configs, contract
from shardwright.kernels.permute.triton import (
    combine_bwd_kernel,
    combine_kernel,
    gather_rows_kernel,
    place_kernel,
    rank_kernel,
    scan_kernel,
    tile_kernel,
)

ADMITTED_IDS, ADMITTED_ROWS = Admitted(), Admitted()


@dataclass(frozen=True)
class Tiles:
    """The tile list of rows sorted by expert, in device memory. ``most`` bounds its length on the host.

    Views of the buffer are made once: a step launches a dozen kernels over one list.
    """

    buffer: Tensor
    """int32: offsets [E+1], number of tiles [1], then expert, first row, row after the last of each tile.

    Each part starts on a 16-byte boundary, so kernels see the same alignment for every E.
    """
    experts: int
    most: int

    @cached_property
    def offsets(self) -> Tensor:
        """int32 ``[E+1]``: expert e owns rows ``offsets[e] .. offsets[e+1]``."""
        return self.buffer[: self.experts + 1]

    @cached_property
    def count(self) -> Tensor:
        """int32 ``[1]``."""
        at = _whole(self.experts + 1)
        return self.buffer[at : at + 1]

    @cached_property
    def _lists(self) -> tuple[Tensor, Tensor, Tensor]:
        expert, first, last = self.buffer[_whole(self.experts + 1) + 4 :].view(3, -1).unbind()
        return expert, first, last

    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """``expert``, ``first`` and ``last``, int32 ``[most]`` each; only ``count`` of them are set."""
        return self._lists


def _whole(n: int) -> int:
    """``n`` 32-bit integers as whole 16-byte vectors."""
    return -(-n // 4) * 4


def tile_buffer_size(rows: int, experts: int) -> int:
    """Integers that ``Tiles.buffer`` holds."""
    return _whole(experts + 1) + 4 + 3 * _whole(max(configs.most_tiles(rows, experts), 1))


@dataclass(frozen=True)
class Routing:
    """Where each (token, slot) entry's row lies among rows sorted by expert."""

    counts: Tensor
    """int32 ``[E]``."""
    entry: Tensor
    """int32 ``[R]``: the entry ``token · K + slot`` of each row; only the first ``sum(counts)`` are set."""
    place: Tensor
    """int32 ``[T, K]``: the row of each entry, -1 where it is not routed."""
    tiles: Tiles

    @property
    def rows(self) -> int:
        return self.entry.shape[0]


def make_tiles(counts: Tensor, rows: int, token: object | None = None) -> Tiles:
    """Offsets and tiles from ``counts [E]`` (integers on the device), of at most ``rows`` rows in all."""
    E = counts.shape[0]
    buffer = torch.empty(tile_buffer_size(rows, E), dtype=torch.int32, device=counts.device)
    tiles = Tiles(buffer, E, configs.most_tiles(rows, E))
    expert, first, last = tiles.lists()
    tensors, key = (counts, tiles.offsets, expert, first, last, tiles.count), key_of(token, "tiles")
    if again(key, tensors):
        return tiles
    with device.current(counts):
        start(
            key,
            tensors,
            tile_kernel,
            (1,),
            counts,
            tiles.offsets,
            expert,
            first,
            last,
            tiles.count,
            E,
            TILE=configs.TILE_ROWS,
            BINS=configs.power_of_two(E),
            num_warps=configs.WARPS,
        )
    return tiles


def route(ids: Tensor, experts: int) -> Routing:
    """Metadata of a routing: stable, deterministic, without a host synchronisation.

    Args:
        ids: ``[T, K]`` int32 or int64; an id outside ``0 .. experts-1`` is not routed and has no row.
        experts: E.

    Raises:
        KernelError: an input outside ``contract.check_ids``.
    """
    token = ADMITTED_IDS.check(
        (ids,), experts, lambda: contract.check_ids(contract.NAME, ids, experts, interpreted=device.interpreted())
    )
    return launch_route(ids, experts, token)


def launch_route(ids: Tensor, experts: int, token: object | None) -> Routing:
    """``route`` on ids that passed the guards; ``token`` stands for their layout and the experts."""
    N = ids.numel()
    index: dict[str, Any] = {"dtype": torch.int32, "device": ids.device}
    place = torch.empty(ids.shape, **index)
    entry = torch.empty(N, **index)
    if N == 0:
        counts = torch.zeros(experts, **index)
        return Routing(counts, entry, place, make_tiles(counts, 0, token))
    chunks, bins = -(-N // configs.CHUNK), configs.power_of_two(experts + 1)
    counts, rank = torch.empty(experts, **index), torch.empty(N, **index)
    histogram = torch.empty((chunks, bins), **index)
    ranked, scanned, placed = (key_of(token, role) for role in ("rank", "scan", "place"))
    if not again(ranked, (ids, rank, histogram)):
        with device.current(ids):
            start(
                ranked,
                (ids, rank, histogram),
                rank_kernel,
                (chunks,),
                ids,
                rank,
                histogram,
                N,
                experts,
                CHUNK=configs.CHUNK,
                COMPARE=configs.COMPARE,
                BINS=bins,
                num_warps=configs.RANK_WARPS,
            )
    if not again(scanned, (histogram, counts)):
        with device.current(ids):
            start(
                scanned,
                (histogram, counts),
                scan_kernel,
                (bins // configs.SCAN_EXPERTS,),
                histogram,
                counts,
                chunks,
                experts,
                BINS=bins,
                ROWS=configs.SCAN_CHUNKS,
                COLUMNS=configs.SCAN_EXPERTS,
                num_warps=configs.WARPS,
            )
    tiles = make_tiles(counts, N, token)
    tensors = (ids, rank, histogram, tiles.offsets, entry, place)
    if not again(placed, tensors):
        with device.current(ids):
            start(
                placed,
                tensors,
                place_kernel,
                (chunks,),
                ids,
                rank,
                histogram,
                tiles.offsets,
                entry,
                place,
                N,
                experts,
                CHUNK=configs.CHUNK,
                BINS=bins,
                num_warps=configs.WARPS,
            )
    return Routing(counts, entry, place, tiles)


def launch_gather(x: Tensor, place: Tensor, out: Tensor, key: Hashable = None) -> None:
    """Fill ``out [R, H]`` with the tokens' rows; rows that no entry takes keep what they have."""
    (T, K), H = place.shape, x.shape[-1]
    if T == 0:
        return
    tensors = (x, place, out)
    if again(key, tensors):
        return
    tile = {"COLUMNS": configs.columns(H), "num_warps": configs.WARPS}
    with device.current(x):
        start(key, tensors, gather_rows_kernel, (T,), x, place, out, T, H, K=K, **tile)


def launch_combine(y: Tensor, place: Tensor, weights: Tensor | None, out: Tensor, key: Hashable = None) -> None:
    """Fill ``out [T, H]`` with the (weighted) sums of the tokens' rows."""
    (T, K), H = place.shape, y.shape[-1]
    if T == 0:
        return
    tensors = (y, place, weights, out)
    if again(key, tensors):
        return
    with device.current(y):
        start(
            key,
            tensors,
            combine_kernel,
            (T,),
            y,
            place,
            y if weights is None else weights,
            out,
            T,
            H,
            K=K,
            WEIGHTED=weights is not None,
            COLUMNS=configs.columns(H),
            num_warps=configs.WARPS,
        )


class GatherRows(torch.autograd.Function):
    """Rows by expert from tokens; the gradient is the plain sum over a token's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, token: object | None) -> Tensor:
        ctx.save_for_backward(place)
        ctx.token = token
        out = x.new_zeros((place.numel(), x.shape[-1]))
        launch_gather(x, place, out, key_of(token, "gather"))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        dx = drows.new_empty((place.shape[0], drows.shape[-1]))
        launch_combine(drows.contiguous(), place, None, dx, key_of(ctx.token, "dx"))
        return dx, None, None


class Combine(torch.autograd.Function):
    """Weighted sums of rows; gradients for rows and weights."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, place: Tensor, weights: Tensor, token: object | None) -> Tensor:
        ctx.save_for_backward(y, place, weights)
        ctx.token = token
        out = y.new_empty((place.shape[0], y.shape[-1]))
        launch_combine(y, place, weights, out, key_of(token, "combine"))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, Tensor, None]:
        y, place, weights = ctx.saved_tensors
        dy, dweights = torch.zeros_like(y), torch.empty_like(weights)
        (T, K), H = place.shape, y.shape[-1]
        dout = dout.contiguous()
        tensors, key = (dout, y, place, weights, dy, dweights), key_of(ctx.token, "combine-bwd")
        if T and not again(key, tensors):
            with device.current(y):
                start(
                    key,
                    tensors,
                    combine_bwd_kernel,
                    (T,),
                    dout,
                    y,
                    place,
                    weights,
                    dy,
                    dweights,
                    T,
                    H,
                    K=K,
                    COLUMNS=configs.columns(H),
                    num_warps=configs.WARPS,
                )
        return dy, None, dweights, None


def gather_rows(x: Tensor, routing: Routing) -> Tensor:
    """``[T, H]`` → ``[R, H]``, sorted by expert; rows past ``sum(counts)`` are zero.

    Raises:
        KernelError: an input outside ``contract.check_rows``.
    """
    token = ADMITTED_ROWS.check(
        (x, routing.place),
        "x",
        lambda: contract.check_rows(contract.NAME, "x", x, interpreted=device.interpreted()),
    )
    return cast(Tensor, GatherRows.apply(x, routing.place, token))


def combine(y: Tensor, routing: Routing, weights: Tensor) -> Tensor:
    """``[R, H]`` and ``weights [T, K]`` → ``[T, H]``: summed in fp32 in slot order, rounded once.

    Rows of entries that are not routed are never read.

    Raises:
        KernelError: an input outside ``contract.check_rows`` or ``contract.check_weights``.
    """

    def guards() -> None:
        contract.check_rows(contract.NAME, "y", y, interpreted=device.interpreted())
        contract.check_weights(contract.NAME, weights, tuple(routing.place.shape))

    token = ADMITTED_ROWS.check((y, routing.place, weights), "y", guards)
    return cast(Tensor, Combine.apply(y, routing.place, weights, token))
