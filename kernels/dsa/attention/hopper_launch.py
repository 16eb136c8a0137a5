"""When the Hopper kernels are used, and how they are started.

Legend: as in ``problem``.
"""

from __future__ import annotations

import math

from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.dsa.attention.backward_triton import permute_kernel
from shardwright.kernels.dsa.attention.configs import power_of_two
from shardwright.kernels.dsa.attention.hopper import (
    GATHER_REGISTERS,
    HEADS,
    LATENT,
    ROPE,
    hopper_forward_kernel,
)
from shardwright.kernels.dsa.attention.hopper_backward import SECOND_REGISTERS, hopper_backward_kernel
from shardwright.kernels.dsa.attention.problem import Problem

LEAST_POSITIONS, MOST_POSITIONS = 512, 4096
"""Tile of a row's survey: at least 4 values from each of 128 threads, at most 32."""

MOST_ADDRESS = (1 << 31) - 1
"""Offsets of gathered keys are 32-bit; those of queries, outputs and their gradients 64-bit."""

PERMUTE_ROWS = 16


def serves(p: Problem) -> bool:
    """Whether the Hopper kernels compute this call: the latent form of 512 + 64 columns in whole blocks of heads."""
    strides = [s for part in (p.qn, p.qr, p.kn, p.kr) if part is not None for s in part.stride()[:2]]
    return (
        device.capability(p.qn) == (9, 0)
        and p.qn.element_size() == 2
        and p.v is None
        and (p.DN, p.DR, p.G) == (LATENT, ROPE, 1)
        and p.H % HEADS == 0
        and p.S > 0
        and 0 < p.positions <= MOST_POSITIONS
        and p.S * max(part.stride(0) for part in (p.kn, p.kr) if part is not None) <= MOST_ADDRESS
        and all(stride % 16 == 0 for stride in strides)
    )


def rotated_zeros(q_nope: Tensor, latent: Tensor) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Zeros in place of rotated parts that a layer lacks, where the Hopper kernels then serve it; else nothing.

    Their tiles are 512 + 64 columns: an eighth more products of the scores, on the faster kernels. The portable ones
    take 512 columns as they are. ``q_nope [T, H, 512]``, ``latent [S, 512]``.
    """
    whole = q_nope.dim() == 3 and q_nope.shape[2] == LATENT and q_nope.shape[1] % HEADS == 0 and latent.dim() == 2
    if not whole or q_nope.element_size() != 2 or device.capability(q_nope) != (9, 0):
        return None, None
    return q_nope.new_zeros(ROPE).expand(*q_nope.shape[:2], -1), latent.new_zeros(latent.shape[0], ROPE)


def _positions(p: Problem) -> int:
    return power_of_two(p.positions, LEAST_POSITIONS)


def forward(p: Problem, y: Tensor, lse: Tensor, o: Tensor, low: Tensor, save: bool) -> None:
    """Fill y, lse and, with ``save``, o (where gated) and low."""
    assert p.qr is not None and p.kr is not None
    hopper_forward_kernel[(p.T * (p.H // HEADS),)](
        p.qn,
        p.qr,
        p.kn,
        p.kr,
        p.indices,
        p.indices if p.bounds is None else p.bounds,
        y if p.gate is None else p.gate,
        lse if p.sinks is None else p.sinks,
        y,
        o,
        low if save else y,
        lse,
        p.scale * math.log2(math.e),
        p.positions,
        p.K,
        p.S,
        p.H,
        p.qn.stride(0),
        p.qn.stride(1),
        p.qr.stride(0),
        p.qr.stride(1),
        p.kn.stride(0),
        p.kr.stride(0),
        POSITIONS=_positions(p),
        BLOCK=p.block,
        BOUNDED=p.bounds is not None,
        GATE=p.gate_kind,
        SINKS=p.sinks is not None,
        SAVE=save,
        REGISTERS=GATHER_REGISTERS,
        num_warps=8,
    )


def _permuted(plain: Tensor, rotated: Tensor) -> Tensor:
    """``[rows, 576]`` of both parts ``[A, B, width]``, columns permuted."""
    rows, heads = plain.shape[0] * plain.shape[1], plain.shape[1]
    out = plain.new_empty((rows, LATENT + ROPE))
    for part, column, width in ((plain, 0, LATENT), (rotated, LATENT, ROPE)):
        permute_kernel[(-(-rows // PERMUTE_ROWS),)](
            part,
            out[:, column:],
            rows,
            heads,
            part.stride(0),
            part.stride(1),
            LATENT + ROPE,
            WIDTH=width,
            ROWS=PERMUTE_ROWS,
            num_warps=4,
        )
    return out


def backward(p: Problem, do: Tensor, lse: Tensor, delta: Tensor, dqn: Tensor, dqr: Tensor | None, dkv: Tensor) -> None:
    """Fill dQ and add to ``dkv [S, 1, 576]``; ``do`` comes with permuted columns."""
    assert p.qr is not None and p.kr is not None and dqr is not None
    hopper_backward_kernel[(p.T * (p.H // HEADS),)](
        _permuted(p.qn, p.qr),
        _permuted(p.kn, p.kr),
        p.indices,
        p.indices if p.bounds is None else p.bounds,
        do,
        lse,
        delta,
        dqn,
        dqr,
        dkv,
        p.scale,
        p.positions,
        p.K,
        p.S,
        p.H,
        POSITIONS=_positions(p),
        BLOCK=p.block,
        BOUNDED=p.bounds is not None,
        REGISTERS=SECOND_REGISTERS,
        num_warps=4,
    )
