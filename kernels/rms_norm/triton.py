# mypy: disable-error-code="no-untyped-def"
"""RMSNorm in Triton: one pass over device memory, whole rows at a time.

Forward moves x and y once; where a row is wide, its second look at the row hits the cache. Backward reads
x and dy once, writes dx once, and keeps the weight gradient of all rows of a program in fp32 registers; a
second small kernel adds the programs' partial sums in a fixed order, so the result has the same bits in
every run on one kind of device.

Legend: T rows, H hidden, P partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"])
def rms_norm_fwd_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    T,
    H,
    eps,
    RELOAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``y [T, H]`` and ``rstd [T]`` (fp32) from ``x [T, H]`` and ``weight [H]``."""
    columns = tl.arange(0, COLUMNS)
    inside = columns < H
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (rows < T)[:, None] & inside[None, :]
        at = rows[:, None] * H + columns[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)
        if RELOAD:  # from cache; registers are free meanwhile, so more programs fit on a multiprocessor
            x = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        normalised = (x * rstd[:, None]).to(weight.dtype)
        tl.store(y_ptr + at, normalised * weight[None, :], mask=mask)
        tl.store(rstd_ptr + rows, rstd, mask=rows < T)


@triton.jit
def norm_gradient(scaled, normalised, rstd, eps, H, SINGLE: tl.constexpr):
    """``rstd·(g - x̂·mean(g·x̂))`` of rows g = ``scaled`` and x̂ = ``normalised``, both ``[ROWS, COLUMNS]``.

    A row of one column (``SINGLE``) is g·rstd·(1 - x̂²), whose difference cancels but for eps: there
    1 - x̂² = eps·rstd² is taken, and NaN of x̂ kept.
    """
    if SINGLE:
        dx = scaled * (eps * rstd * rstd * rstd)[:, None]
        return tl.where(normalised == normalised, dx, normalised)
    else:
        along = tl.sum(scaled * normalised, axis=1) / H
        return (scaled - normalised * along[:, None]) * rstd[:, None]


@triton.jit(do_not_specialize=["T"])
def rms_norm_bwd_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    T,
    H,
    eps,
    SINGLE: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``dx [T, H]``, and one row of ``partial [P, H]`` (fp32) a program where the weight learns.

    With x̂ = x·rstd and g = dy·w: dx = rstd·(g - x̂·mean(g·x̂)), dw = Σ_rows dy·x̂.
    """
    columns = tl.arange(0, COLUMNS)
    inside = columns < H
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    dweight = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (rows < T)[:, None] & inside[None, :]
        at = rows[:, None] * H + columns[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < T, other=0.0)
        normalised = x * rstd[:, None]
        scaled = dy * weight.to(tl.float32)[None, :]
        dx = norm_gradient(scaled, normalised, rstd, eps, H, SINGLE)
        tl.store(dx_ptr + at, dx.to(weight.dtype), mask=mask)
        if WEIGHT_GRADIENT:
            dweight += dy * normalised
    if WEIGHT_GRADIENT:
        start = tl.cast(tl.program_id(0), tl.int64) * H
        tl.store(partial_ptr + start + columns, tl.sum(dweight, axis=0), mask=inside)


@triton.jit(do_not_specialize=["P"])
def rms_norm_bwd_weight_kernel(partial_ptr, dweight_ptr, P, H, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr):
    """``dweight [H]``: the sum over ``partial [P, H]`` in a fixed order."""
    columns = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = columns < H
    total = tl.zeros([BLOCK_P, BLOCK_H], dtype=tl.float32)
    for first in tl.range(0, P, BLOCK_P):
        rows = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_P)
        mask = (rows < P)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + rows[:, None] * H + columns[None, :], mask=mask, other=0.0)
    tl.store(dweight_ptr + columns, tl.sum(total, axis=0).to(dweight_ptr.dtype.element_ty), mask=inside)
