# mypy: disable-error-code="no-untyped-def"
"""Rotation of q and k, and their rounding to fp8, in Triton.

Legend: N heads of a position, D head width.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "query_start"])
def indexer_rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    rows,
    query_start,
    sign,
    N: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotate the first ``2 · HALF`` of D dims of ``rows`` heads, N a position, in fp32 with one rounding.

    ``sign`` -1 turns back: the transpose, for gradients.
    """
    row = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None]
    i = tl.arange(0, HALF)
    table = (query_start + row // N)[:, None] * HALF + i[None, :]
    c = tl.load(cos_ptr + table, mask=mask, other=0.0)
    s = tl.load(sin_ptr + table, mask=mask, other=0.0) * sign
    if INTERLEAVED:
        pair = tl.arange(0, 2 * HALF)
        at = row[:, None] * D + pair[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [ROWS, HALF, 2]))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), [ROWS, 2 * HALF])
        tl.store(y_ptr + at, turned.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        at = row[:, None] * D + i[None, :]
        a = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, (a * c - b * s).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + at + HALF, (b * c + a * s).to(y_ptr.dtype.element_ty), mask=mask)
    if 2 * HALF < D:
        d = tl.arange(0, D)
        rest = row[:, None] * D + d[None, :]
        live = mask & (d >= 2 * HALF)[None, :]
        tl.store(y_ptr + rest, tl.load(x_ptr + rest, mask=live, other=0.0), mask=live)


@triton.jit(do_not_specialize=["rows"])
def indexer_quantise_kernel(
    x_ptr, factor_ptr, y_ptr, scale_ptr, rows, FACTOR: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):
    """Each row of D values as e4m3 and its scale in fp32, times the row's own factor where FACTOR."""
    row = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    mask = (row < rows)[:, None]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-12)
    scale = largest / 448.0
    x = x / scale[:, None]
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    shift = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    x = (x + shift) - shift
    tl.store(y_ptr + at, x.to(tl.float8e4nv), mask=mask)
    if FACTOR:
        scale = scale * tl.load(factor_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(scale_ptr + row, scale, mask=row < rows)
