# mypy: disable-error-code="no-untyped-def"
"""Residual add and RMSNorm in Triton: the sum is normalised while it is still in registers.

Backward folds the gradient that reaches the new residual into the norm's own, so the sum over both
paths costs no pass of its own; x and residual share one gradient tensor.

Legend: T rows, H hidden, P partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.rms_norm.triton import norm_gradient


@triton.jit(do_not_specialize=["T"])
def add_rms_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    rstd_ptr,
    T,
    H,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``total = x + residual``, ``y = rms_norm(total)`` and ``rstd [T]`` (fp32); all else ``[T, H]``."""
    columns = tl.arange(0, COLUMNS)
    inside = columns < H
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (rows < T)[:, None] & inside[None, :]
        at = rows[:, None] * H + columns[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        total = (x + residual).to(weight.dtype)
        tl.store(total_ptr + at, total, mask=mask)
        wide = total.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / H + eps)
        normalised = (wide * rstd[:, None]).to(weight.dtype)
        tl.store(y_ptr + at, normalised * weight[None, :], mask=mask)
        tl.store(rstd_ptr + rows, rstd, mask=rows < T)


@triton.jit(do_not_specialize=["T"])
def add_rms_norm_bwd_kernel(
    dy_ptr,
    dtotal_ptr,
    total_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    T,
    H,
    eps,
    SINGLE: tl.constexpr,
    RESIDUAL_GRADIENT: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``dx [T, H]`` (also the residual's gradient), and one row of ``partial [P, H]`` a program.

    With x̂ = total·rstd and g = dy·w: dx = dtotal + rstd·(g - x̂·mean(g·x̂)), dw = Σ_rows dy·x̂.
    """
    columns = tl.arange(0, COLUMNS)
    inside = columns < H
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    dweight = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (rows < T)[:, None] & inside[None, :]
        at = rows[:, None] * H + columns[None, :]
        total = tl.load(total_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < T, other=0.0)
        normalised = total * rstd[:, None]
        scaled = dy * weight.to(tl.float32)[None, :]
        dx = norm_gradient(scaled, normalised, rstd, eps, H, SINGLE)
        if RESIDUAL_GRADIENT:
            dx += tl.load(dtotal_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(weight.dtype), mask=mask)
        if WEIGHT_GRADIENT:
            dweight += dy * normalised
    if WEIGHT_GRADIENT:
        start = tl.cast(tl.program_id(0), tl.int64) * H
        tl.store(partial_ptr + start + columns, tl.sum(dweight, axis=0), mask=inside)
