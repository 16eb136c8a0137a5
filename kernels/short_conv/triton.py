# mypy: disable-error-code="no-untyped-def"
"""Depthwise causal convolution over J taps with SiLU, forward and backward; documents apart, a first state.

``z_t = Σ_d w_d x_(t-J+1+d)`` and ``y = z σ(z)``; before a document's first token stand the J - 1 inputs of its initial
state, or zeros. Sums are fp32 and one rounding ends them. The backward recomputes z at the J rows that a token reaches:
from cache, so that x and dy are read and dx is written once each.

Legend: C channels, J taps, BT tokens of a piece, NT pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolved(
    x_ptr, w_ptr, initial_ptr, tokens, valid, begin, doc, cols, there, C,
    J: tl.constexpr, WITH_INITIAL: tl.constexpr,
):  # fmt: skip
    """``z [rows, cols]`` of the tokens, fp32; 0 where ``valid`` is false."""
    z = tl.zeros((tokens.shape[0], cols.shape[0]), tl.float32)
    for d in tl.static_range(J):
        back = tokens - (J - 1 - d)
        inside = (valid & (back >= begin))[:, None] & there[None, :]
        at = back.to(tl.int64)[:, None] * C + cols[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if WITH_INITIAL and d < J - 1:
            before = (valid & (back < begin))[:, None] & there[None, :]
            place = (doc * C + cols[None, :]) * (J - 1) + (back - begin + J - 1)[:, None]
            x += tl.load(initial_ptr + place, mask=before, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols * J + d, mask=there, other=0.0).to(tl.float32)
        z += x * w[None, :]
    return z


@triton.jit
def input_gradient(
    dy_ptr, x_ptr, w_ptr, initial_ptr, tokens, begin, end, doc, cols, there, C,
    J: tl.constexpr, SILU: tl.constexpr, WITH_INITIAL: tl.constexpr,
):  # fmt: skip
    """Gradient of the inputs at ``tokens`` ``[rows, cols]``; they may lie before the document's first token."""
    dx = tl.zeros((tokens.shape[0], cols.shape[0]), tl.float32)
    for s in tl.static_range(J):
        ahead = tokens + s
        dz = sum_gradient(
            dy_ptr, x_ptr, w_ptr, initial_ptr, ahead, begin, end, doc, cols, there, C, J, SILU, WITH_INITIAL
        )
        w = tl.load(w_ptr + cols * J + (J - 1 - s), mask=there, other=0.0).to(tl.float32)
        dx += dz * w[None, :]
    return dx


@triton.jit
def sum_gradient(
    dy_ptr, x_ptr, w_ptr, initial_ptr, tokens, begin, end, doc, cols, there, C,
    J: tl.constexpr, SILU: tl.constexpr, WITH_INITIAL: tl.constexpr,
):  # fmt: skip
    """Gradient of z at ``tokens``; 0 outside the document."""
    valid = (tokens >= begin) & (tokens < end)
    at = tokens.to(tl.int64)[:, None] * C + cols[None, :]
    dz = tl.load(dy_ptr + at, mask=valid[:, None] & there[None, :], other=0.0).to(tl.float32)
    if SILU:
        z = convolved(x_ptr, w_ptr, initial_ptr, tokens, valid, begin, doc, cols, there, C, J, WITH_INITIAL)
        gate = tl.sigmoid(z)
        dz = dz * gate * (1.0 + z * (1.0 - gate))
    return dz


@triton.jit
def short_conv_fwd_kernel(
    x_ptr, w_ptr, initial_ptr, table_ptr, y_ptr, C,
    J: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr, WITH_INITIAL: tl.constexpr,
):  # fmt: skip
    """One piece of a document and one block of channels: ``y [tokens, C]``."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    piece = tl.program_id(1)
    there = cols < C
    start = tl.load(table_ptr + 4 * piece)
    begin = tl.load(table_ptr + 4 * piece + 1)
    end = tl.load(table_ptr + 4 * piece + 2)
    doc = tl.load(table_ptr + 4 * piece + 3).to(tl.int64)
    tokens = start + tl.arange(0, BT)
    valid = tokens < end
    z = convolved(x_ptr, w_ptr, initial_ptr, tokens, valid, begin, doc, cols, there, C, J, WITH_INITIAL)
    if SILU:
        z = z * tl.sigmoid(z)
    at = tokens.to(tl.int64)[:, None] * C + cols[None, :]
    tl.store(y_ptr + at, z.to(y_ptr.dtype.element_ty), mask=valid[:, None] & there[None, :])


@triton.jit
def short_conv_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, initial_ptr, table_ptr, dx_ptr, dw_ptr, dinitial_ptr, C,
    J: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, SILU: tl.constexpr,
    WITH_INITIAL: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr,
):  # fmt: skip
    """One piece and one block of channels: ``dx [tokens, C]``; shares of dw ``[NT, C, J]`` and, in a document's first
    piece, ``dinitial [N, C, J - 1]``, both fp32."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    piece = tl.program_id(1)
    there = cols < C
    start = tl.load(table_ptr + 4 * piece)
    begin = tl.load(table_ptr + 4 * piece + 1)
    end = tl.load(table_ptr + 4 * piece + 2)
    doc = tl.load(table_ptr + 4 * piece + 3).to(tl.int64)
    tokens = start + tl.arange(0, BT)
    valid = tokens < end
    dx = input_gradient(
        dy_ptr, x_ptr, w_ptr, initial_ptr, tokens, begin, end, doc, cols, there, C, J, SILU, WITH_INITIAL
    )
    at = tokens.to(tl.int64)[:, None] * C + cols[None, :]
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=valid[:, None] & there[None, :])
    if WEIGHT_GRADIENT:
        stop = tl.minimum(end, start + BT)
        dz = sum_gradient(
            dy_ptr, x_ptr, w_ptr, initial_ptr, tokens, begin, stop, doc, cols, there, C, J, SILU, WITH_INITIAL
        )
        for d in tl.static_range(J):
            back = tokens - (J - 1 - d)
            inside = (valid & (back >= begin))[:, None] & there[None, :]
            x = tl.load(x_ptr + back.to(tl.int64)[:, None] * C + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            if WITH_INITIAL and d < J - 1:
                before = (valid & (back < begin))[:, None] & there[None, :]
                place = (doc * C + cols[None, :]) * (J - 1) + (back - begin + J - 1)[:, None]
                x += tl.load(initial_ptr + place, mask=before, other=0.0).to(tl.float32)
            tl.store(dw_ptr + (tl.cast(piece, tl.int64) * C + cols) * J + d, tl.sum(dz * x, 0), mask=there)
    if WITH_INITIAL:  # noqa: SIM102 - one is known to the compiler, the other is not
        if start == begin:
            kept = tl.arange(0, 8)
            ahead = input_gradient(
                dy_ptr, x_ptr, w_ptr, initial_ptr, begin - (J - 1) + kept, begin, end, doc, cols, there, C,
                J, SILU, WITH_INITIAL,
            )  # fmt: skip
            corner = (doc * C + cols[None, :]) * (J - 1) + kept[:, None]
            tl.store(dinitial_ptr + corner, ahead, mask=(kept < J - 1)[:, None] & there[None, :])
