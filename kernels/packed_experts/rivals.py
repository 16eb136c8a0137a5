"""What a user has without this operator: dequantise the layer's stacks, then torch's grouped products.

Everything elementwise is compiled (torch.compile), the checkpoint's bytes are decoded by bit moves into bf16, and
each product is one ``grouped_mm``. The copy of one layer is either made again in the backward, or kept from the
forward on; the kept one is the faster rival of a single layer, and in a whole model needs checkpointing to fit.

Legend: R rows, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor

from shardwright.kernels.grouped_lora_mlp.rivals import grouped_mm

BETA, LINEAR_BETA = 4.0, 25.0
LIMIT, SLOPE = 7.0, 1.702
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


def biased_clamped(gu: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
    """gpt-oss: gate and up alternate; min(g, 7) σ(1.702 min(g, 7)) · (clamp(u, ±7) + 1) of ``gu + bias``, in fp32."""
    both = gu.float() + bias[expert].float()
    low, up = both[:, 0::2].clamp(max=LIMIT), both[:, 1::2].clamp(-LIMIT, LIMIT)
    return (low * torch.sigmoid(SLOPE * low) * (up + 1)).to(gu.dtype)


def biased_clamped_backward(gu: Tensor, bias: Tensor, expert: Tensor, dh: Tensor) -> Tensor:
    """The gradient of ``biased_clamped`` for its first argument."""
    both, d = gu.float() + bias[expert].float(), dh.float()
    g, u = both[:, 0::2], both[:, 1::2]
    low, up = g.clamp(max=LIMIT), u.clamp(-LIMIT, LIMIT)
    s = torch.sigmoid(SLOPE * low)
    dg = torch.where(g <= LIMIT, d * (up + 1) * (s + SLOPE * low * s * (1 - s)), 0.0)
    du = torch.where(u.abs() <= LIMIT, d * low * s, 0.0)
    return torch.stack((dg, du), -1).flatten(-2).to(gu.dtype)


def add_bias(y: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
    """Each row plus its expert's bias."""
    return y + bias[expert]


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return cast(Callable[..., Tensor], torch.compile(function, dynamic=False))


class Elementwise(NamedTuple):
    """What is computed between the products and after them, compiled."""

    inner: Callable[[Tensor], Tensor]
    """gu [R, F] → h [R, I]."""
    inner_backward: Callable[[Tensor, Tensor], Tensor]
    """gu, dh → dgu."""
    outer: Callable[[Tensor], Tensor] | None = None
    """y → y."""


def k3() -> Elementwise:
    """SiTU without biases."""
    return Elementwise(_compiled(situ), _compiled(situ_backward))


def gpt_oss(up_bias: Tensor, down_bias: Tensor, ends: Tensor, R: int) -> Elementwise:
    """The clamped SwiGLU with biases [E, F] and [E, H]; rows of nobody get the last expert's."""
    rows = torch.arange(R, device=ends.device)
    expert = torch.searchsorted(ends, rows, right=True).clamp_(max=ends.numel() - 1)
    return Elementwise(
        lambda gu: _compiled(biased_clamped)(gu, up_bias, expert),
        lambda gu, dh: _compiled(biased_clamped_backward)(gu, up_bias, expert, dh),
        lambda y: _compiled(add_bias)(y, down_bias, expert),
    )


class DequantiseThenGrouped(torch.autograd.Function):
    """The rival's forward and dx; ``keeps`` the bf16 copies for the backward, or makes them again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ends: Tensor, gate_up: Bytes, down: Bytes, keeps: bool, between: Elementwise
    ) -> Tensor:
        decode = _compiled(decode_bytes)
        wide = decode(*gate_up)
        gu = grouped_mm(x, wide, ends)
        h = between.inner(gu)
        if not keeps:
            del wide
        narrow = decode(*down)
        ctx.save_for_backward(gu, ends)
        ctx.packed, ctx.copies, ctx.between = (gate_up, down), ((wide, narrow) if keeps else None), between
        y = grouped_mm(h, narrow, ends)
        return y if between.outer is None else between.outer(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        gu, ends = ctx.saved_tensors
        product = getattr(nnf, "grouped_mm", None) or torch._grouped_mm
        decode = _compiled(decode_bytes)
        narrow = ctx.copies[1] if ctx.copies else decode(*ctx.packed[1])
        dgu = ctx.between.inner_backward(gu, product(dy, narrow, offs=ends))
        del narrow
        wide = ctx.copies[0] if ctx.copies else decode(*ctx.packed[0])
        return product(dgu, wide, offs=ends), None, None, None, None, None
