"""Starts of query/key norm + RoPE: grids, strides, compile-time choices.

Legend: B batch, T tokens, Q and K heads, D head width, W rotary width, P programs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.launch import Launch
from shardwright.kernels.qk_norm_rope import configs, contract
from shardwright.kernels.qk_norm_rope.triton import qk_norm_rope_bwd_kernel, qk_norm_rope_fwd_kernel
from shardwright.kernels.rms_norm.op import reduce_weight_gradient


class Settings(NamedTuple):
    """What the model fixes."""

    width: int
    pairing: str = "half"
    last: bool = False
    eps: float | None = None
    unit_offset: bool = False


class Inputs(NamedTuple):
    """What the operator reads, in its order."""

    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None

    def rows(self) -> tuple[int, int]:
        """Heads of all tokens: of queries, of keys."""
        return self.q.numel() // self.q.shape[-1], self.k.numel() // self.k.shape[-1]

    def weights(self) -> tuple[Tensor, Tensor]:
        """Both weights; any tensor in their place where there is no norm."""
        return self.q if self.q_weight is None else self.q_weight, self.k if self.k_weight is None else self.k_weight

    def sizes(self) -> tuple[int, int, int]:
        """Tokens of a batch row, and heads of queries and keys."""
        return self.q.shape[-3], self.q.shape[-2], self.k.shape[-2]

    def strides(self) -> tuple[int, ...]:
        """Those of q, k, cos and sin, as the kernels take them."""
        return (*steps(self.q), *steps(self.k), *table_steps(self.cos), *table_steps(self.sin))

    def width(self, settings: Settings) -> int:
        """Columns of the wider of both tiles: what launch configurations go by."""
        return max(configs.tile_width(x.shape[-1], settings.width) for x in (self.q, self.k))

    def constants(self, settings: Settings) -> dict[str, Any]:
        """What kernels take at compile time: the model's own sizes and choices."""
        DQ, DK, W = self.q.shape[-1], self.k.shape[-1], settings.width
        return {
            "DQ": DQ,
            "DK": DK,
            "W": W,
            "KIND": contract.PAIRINGS.index(settings.pairing),
            "LAST": settings.last,
            "WHOLE": self.cos.shape[-1] == W and settings.pairing == "half",
            "NORM": self.q_weight is not None,
            "UNIT_OFFSET": settings.unit_offset,
            "HALF": configs.power_of_two(W // 2),
            "PASS_Q": configs.power_of_two(DQ - W),
            "PASS_K": configs.power_of_two(DK - W),
        }


Pair = tuple[Tensor, Tensor]
"""One tensor of the queries and one of the keys."""


def steps(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, token and head, in values."""
    found = x.stride()[:-1]
    return (0, found[0], found[1]) if len(found) == 2 else (found[0], found[1], found[2])


def table_steps(table: Tensor) -> tuple[int, int]:
    """Strides of batch (0 where all share one table) and token, in values."""
    shared = table.dim() == 2 or table.shape[0] == 1
    return (0 if shared else table.stride(0)), table.stride(-2)


def launch_forward(given: Inputs, settings: Settings, out: Pair, launch: Launch, key: Hashable = None) -> None:
    """Fill ``out`` (dense); nothing is launched for zero tokens."""
    RQ, RK = given.rows()
    if RQ == 0:
        return
    q, k, cos, sin, q_weight, k_weight = given
    tensors = (q, k, *out, q_weight, k_weight, cos, sin)
    if again(key, tensors):
        return
    tiles = -(-RQ // launch.rows)
    with device.current(q):
        start(
            key,
            tensors,
            qk_norm_rope_fwd_kernel,
            (tiles - (-RK // launch.rows),),
            q,
            k,
            *out,
            *given.weights(),
            cos,
            sin,
            RQ,
            RK,
            *given.sizes(),
            tiles,
            *given.strides(),
            settings.eps or 0.0,
            **given.constants(settings),
            ROWS=launch.rows,
            num_warps=launch.warps,
        )


def share(tiles: tuple[int, int], programs: int) -> tuple[int, int]:
    """Programs for queries and for keys, in proportion to their tiles, at least one each."""
    most = min(sum(tiles), max(2, programs))
    first = min(max(1, round(most * tiles[0] / sum(tiles))), most - 1)
    return min(first, tiles[0]), min(most - first, tiles[1])


def launch_backward(
    d_out: Pair,
    given: Inputs,
    settings: Settings,
    d_in: Pair,
    dweights: Pair | None,
    launch: Launch,
    token: object | None = None,
) -> None:
    """Fill ``d_in`` (dense) and, where the weights learn, both gradients of them."""
    RQ, RK = given.rows()
    if RQ == 0:
        for dweight in dweights or ():
            dweight.zero_()
        return
    q, k, cos, sin, q_weight, k_weight = given
    most = launch.programs_per_sm * device.multiprocessors(q)
    P = share((-(-RQ // launch.rows), -(-RK // launch.rows)), most)
    partials = None
    if dweights is not None:
        wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        partials = torch.empty((P[0], q.shape[-1]), **wide), torch.empty((P[1], k.shape[-1]), **wide)
    tensors = (*d_out, q, k, *d_in, q_weight, k_weight, *(partials or (None, None)), cos, sin)
    # Gradients' heads and tokens may lie anywhere: the token does not know their strides.
    key = key_of(token, "bwd", dweights is None, d_out[0].stride(), d_out[1].stride())
    if not again(key, tensors):
        with device.current(q):
            start(
                key,
                tensors,
                qk_norm_rope_bwd_kernel,
                (sum(P),),
                *d_out,
                q,
                k,
                *d_in,
                *given.weights(),
                *(partials or d_in),
                cos,
                sin,
                RQ,
                RK,
                *given.sizes(),
                *P,
                *steps(d_out[0]),
                *steps(d_out[1]),
                *given.strides(),
                settings.eps or 0.0,
                **given.constants(settings),
                WEIGHT_GRADIENT=dweights is not None,
                ROWS=launch.rows,
                STAGES=launch.stages,
                num_warps=launch.warps,
            )
    if partials is not None and dweights is not None:
        for role, partial, dweight in zip(("dq_weight", "dk_weight"), partials, dweights, strict=True):
            reduce_weight_gradient(partial, dweight, key_of(token, role))
