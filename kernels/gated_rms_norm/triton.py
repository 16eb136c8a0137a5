# mypy: disable-error-code="no-untyped-def"
"""Gated RMSNorm in Triton: one pass over device memory, whole rows at a time.

x, gate and dy are read where they lie (rows.py says where a row starts); y, dx and dgate are dense. All
arithmetic is fp32 with one rounding at each store. The weight gradient stays in fp32 registers of a program;
RMSNorm's second kernel adds the programs' partial sums in a fixed order.

Legend: R rows, D row width, P partial sums; ``*_m``, ``*_i`` sizes of the middle and inner step between rows,
``*_so``, ``*_sm``, ``*_si`` the strides of the outer, middle and inner step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.rms_norm.triton import norm_gradient


@triton.jit
def row_starts(rows, middle, inner, outer_stride, middle_stride, inner_stride):
    """First value of each row, 64-bit; the divisions are 32-bit and vanish for sizes of 1."""
    group = rows // inner
    start = tl.cast(group // middle, tl.int64) * outer_stride
    return start + tl.cast(group % middle, tl.int64) * middle_stride + tl.cast(rows % inner, tl.int64) * inner_stride


@triton.jit(do_not_specialize=["R"])
def gated_rms_norm_fwd_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    x_m,
    x_i,
    x_so,
    x_sm,
    x_si,
    gate_m,
    gate_i,
    gate_so,
    gate_sm,
    gate_si,
    R,
    D,
    eps,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``y [R, D]`` and ``rstd [R]`` (fp32) from ``x``, ``gate`` and ``weight [D]``."""
    columns = tl.arange(0, COLUMNS)
    inside = columns < D
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        live = rows < R
        mask = live[:, None] & inside[None, :]
        x_at = row_starts(rows, x_m, x_i, x_so, x_sm, x_si)[:, None] + columns[None, :]
        gate_at = row_starts(rows, gate_m, gate_i, gate_so, gate_sm, gate_si)[:, None] + columns[None, :]
        x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + gate_at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
        activated = tl.sigmoid(gate)
        if SILU:
            activated = gate * activated
        y = x * rstd[:, None] * weight[None, :] * activated
        y_at = tl.cast(rows, tl.int64)[:, None] * D + columns[None, :]
        tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(rstd_ptr + rows, rstd, mask=live)


@triton.jit(do_not_specialize=["R"])
def gated_rms_norm_bwd_kernel(
    dy_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    dy_m,
    dy_i,
    dy_so,
    dy_sm,
    dy_si,
    x_m,
    x_i,
    x_so,
    x_sm,
    x_si,
    gate_m,
    gate_i,
    gate_so,
    gate_sm,
    gate_si,
    R,
    D,
    eps,
    SILU: tl.constexpr,
    SINGLE: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``dx``, ``dgate [R, D]``, and one row of ``partial [P, D]`` (fp32) a program where the weight learns.

    With x̂ = x·rstd, a = act(gate), d = dy·a and g = d·w: dgate = dy·x̂·w·act'(gate),
    dx = rstd·(g - x̂·mean(g·x̂)), dw = Σ_rows d·x̂.
    """
    columns = tl.arange(0, COLUMNS)
    inside = columns < D
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        live = rows < R
        mask = live[:, None] & inside[None, :]
        dy_at = row_starts(rows, dy_m, dy_i, dy_so, dy_sm, dy_si)[:, None] + columns[None, :]
        x_at = row_starts(rows, x_m, x_i, x_so, x_sm, x_si)[:, None] + columns[None, :]
        gate_at = row_starts(rows, gate_m, gate_i, gate_so, gate_sm, gate_si)[:, None] + columns[None, :]
        x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + gate_at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + dy_at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
        normalised = x * rstd[:, None]
        opened = tl.sigmoid(gate)
        if SILU:
            activated = gate * opened
            slope = opened * (1.0 + gate * (1.0 - opened))
        else:
            activated = opened
            slope = opened * (1.0 - opened)
        at = tl.cast(rows, tl.int64)[:, None] * D + columns[None, :]
        dgate = dy * normalised * weight[None, :] * slope
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
        dnormed = dy * activated
        scaled = dnormed * weight[None, :]
        dx = norm_gradient(scaled, normalised, rstd, eps, D, SINGLE)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WEIGHT_GRADIENT:
            dweight += dnormed * normalised
    if WEIGHT_GRADIENT:
        start = tl.cast(tl.program_id(0), tl.int64) * D
        tl.store(partial_ptr + start + columns, tl.sum(dweight, axis=0), mask=inside)
