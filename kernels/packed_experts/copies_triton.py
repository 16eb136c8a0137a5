# mypy: disable-error-code="no-untyped-def"
"""A dequantised copy of a packed stack, and zeros for rows that belong to no expert.

Legend: R rows, E experts, H hidden, N out and K in of a stack. ``MX``: MXFP4, else fp8 with 128 × 128 scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.packed_experts.decode import decode_fp8, decode_mxfp4, high_scale, low_scale
from shardwright.kernels.packed_experts.triton import HALF, STEP_DEPTH, row_scales


@triton.jit
def dequantise_kernel(
    v_ptr, s_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, BN: tl.constexpr,
    MX: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """``out [E, N, K]`` (bf16) from a packed stack: BN rows × 64·BLOCKS columns of one expert a program."""
    column, expert = tl.program_id(0), tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    for step in tl.static_range(BLOCKS):
        k = (column * BLOCKS + step) * STEP_DEPTH
        c = tl.arange(0, HALF)
        live = (n < N)[:, None] & (k + c < K)[None, :]
        scale = row_scales(s_ptr, expert, n, n < N, k, N, K, MX)
        row = expert * N + n.to(tl.int64)
        if MX:
            packed = tl.load(v_ptr + row[:, None] * (K // 2) + k // 2 + c[None, :], mask=live, other=0)
            low, high = decode_mxfp4(packed, low_scale(scale)[:, None], high_scale(scale)[:, None], ASM)
        else:
            at = v_ptr + row[:, None] * K + k + c[None, :]
            low = decode_fp8(tl.load(at, mask=live, other=0.0), scale[:, None])
            high = decode_fp8(tl.load(at + HALF, mask=live, other=0.0), scale[:, None])
        out = out_ptr + row[:, None] * K + k + c[None, :]
        tl.store(out, low, mask=live)
        tl.store(out + HALF, high, mask=live)


@triton.jit(do_not_specialize=["R", "E"])
def zero_tail_kernel(y_ptr, offsets_ptr, R, E, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero the rows of ``y [R, H]`` after the last expert's; a program whose rows all lie before it only looks."""
    end = tl.load(offsets_ptr + E)
    start = tl.program_id(0) * ROWS
    stop = tl.minimum(start + ROWS, R)
    columns = tl.arange(0, COLUMNS)
    for row in tl.range(tl.maximum(start, end), stop):
        at = y_ptr + tl.cast(row, tl.int64) * H
        for c in tl.range(0, H, COLUMNS):
            tl.store(at + c + columns, tl.zeros([COLUMNS], y_ptr.dtype.element_ty), mask=c + columns < H)
