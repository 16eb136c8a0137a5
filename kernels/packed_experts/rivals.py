"""What a user has without this operator: dequantise the layer's stacks, then torch's grouped products.

Everything elementwise is compiled (torch.compile), the checkpoint's bytes are decoded by bit moves into bf16, and
each product is one ``grouped_mm``. The copy of one layer is either made again in the backward, or kept from the
forward on; the kept one is the faster rival of a single layer, and in a whole model needs checkpointing to fit.

Legend: R rows, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor

from shardwright.kernels.grouped_lora_mlp.rivals import grouped_mm

BETA, LINEAR_BETA = 4.0, 25.0
Bytes = tuple[Tensor, Tensor]
"""A stack as compressed-tensors has it: packed [E, N, K/2] and scale [E, N, K/32], uint8."""


def decode_bytes(packed: Tensor, scale: Tensor) -> Tensor:
    """bf16 [E, N, K] by moving each code's bits into a bf16's and two exact products (scale codes 1 … 254)."""
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2).int()
    bits = ((codes & 0x8) << 12) | ((codes & 0x7) << 6)
    values = bits.to(torch.int16).view(torch.bfloat16) * 2.0**126
    power = (scale.to(torch.int16) << 7).view(torch.bfloat16)
    return (values.unflatten(-1, (-1, 32)) * power.unsqueeze(-1)).flatten(-2)


def situ(gu: Tensor) -> Tensor:
    """β₁ tanh(g/β₁) σ(g) · β₂ tanh(u/β₂), in fp32."""
    g, u = (half.float() for half in gu.chunk(2, -1))
    return (BETA * torch.tanh(g / BETA) * torch.sigmoid(g) * LINEAR_BETA * torch.tanh(u / LINEAR_BETA)).to(gu.dtype)


def situ_backward(gu: Tensor, dh: Tensor) -> Tensor:
    """The gradient of ``situ``, gate half first."""
    g, u = (half.float() for half in gu.chunk(2, -1))
    d, s, t, v = dh.float(), torch.sigmoid(g), torch.tanh(g / BETA), torch.tanh(u / LINEAR_BETA)
    dg = d * LINEAR_BETA * v * (s * (1 - t * t) + BETA * t * s * (1 - s))
    return torch.cat((dg, d * BETA * t * s * (1 - v * v)), -1).to(gu.dtype)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return cast(Callable[..., Tensor], torch.compile(function, dynamic=False))


class DequantiseThenGrouped(torch.autograd.Function):
    """The rival's forward and dx; ``keeps`` the bf16 copies for the backward, or makes them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, gate_up: Bytes, down: Bytes, keeps: bool) -> Tensor:
        decode = _compiled(decode_bytes)
        wide = decode(*gate_up)
        gu = grouped_mm(x, wide, ends)
        h = _compiled(situ)(gu)
        if not keeps:
            del wide
        narrow = decode(*down)
        ctx.save_for_backward(gu, ends)
        ctx.packed, ctx.copies = (gate_up, down), ((wide, narrow) if keeps else None)
        return grouped_mm(h, narrow, ends)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        gu, ends = ctx.saved_tensors
        product = getattr(nnf, "grouped_mm", None) or torch._grouped_mm
        decode = _compiled(decode_bytes)
        narrow = ctx.copies[1] if ctx.copies else decode(*ctx.packed[1])
        dgu = _compiled(situ_backward)(gu, product(dy, narrow, offs=ends))
        del narrow
        wide = ctx.copies[0] if ctx.copies else decode(*ctx.packed[0])
        return product(dgu, wide, offs=ends), None, None, None, None
