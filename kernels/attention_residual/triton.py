# mypy: disable-error-code="no-untyped-def"
"""Attention residuals' kernels: every row is read where it lies, once forward, twice (from cache) backward.

Forward keeps a running softmax over the rows, so that a row's values are in registers once. Backward makes the mix
again, for the sum that all weights share, then each row's gradient. A row's logit is ``s_r · (u · row_r)`` with
``u = norm × projection`` and ``s_r = 1 / rms(row_r)``.

Legend: T tokens, R rows, H hidden, P programs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chosen(place, p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15):
    """The address of row ``place``, 16-byte aligned: one loop serves any number of rows, its loads pipelined."""
    pointer = tl.where(place == 1, p1, p0)
    pointer = tl.where(place == 2, p2, pointer)
    pointer = tl.where(place == 3, p3, pointer)
    pointer = tl.where(place == 4, p4, pointer)
    pointer = tl.where(place == 5, p5, pointer)
    pointer = tl.where(place == 6, p6, pointer)
    pointer = tl.where(place == 7, p7, pointer)
    pointer = tl.where(place == 8, p8, pointer)
    pointer = tl.where(place == 9, p9, pointer)
    pointer = tl.where(place == 10, p10, pointer)
    pointer = tl.where(place == 11, p11, pointer)
    pointer = tl.where(place == 12, p12, pointer)
    pointer = tl.where(place == 13, p13, pointer)
    pointer = tl.where(place == 14, p14, pointer)
    pointer = tl.where(place == 15, p15, pointer)
    return tl.multiple_of(pointer, 16)


@triton.jit(do_not_specialize=["T", "R"])
def attention_residual_fwd_kernel(
    row_0_ptr,
    row_1_ptr,
    row_2_ptr,
    row_3_ptr,
    row_4_ptr,
    row_5_ptr,
    row_6_ptr,
    row_7_ptr,
    row_8_ptr,
    row_9_ptr,
    row_10_ptr,
    row_11_ptr,
    row_12_ptr,
    row_13_ptr,
    row_14_ptr,
    row_15_ptr,
    norm_ptr,
    projection_ptr,
    y_ptr,
    rstd_ptr,
    logit_ptr,
    lse_ptr,
    T,
    R,
    H,
    eps,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``y [T, H]``; where a backward follows, ``rstd [R, T]``, ``logit [R, T]`` and ``lse [T]``, in fp32."""
    columns = tl.arange(0, COLUMNS)
    inside = columns < H
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0)
    direction = norm.to(tl.float32) * tl.load(projection_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=1):
        tokens = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        here = tokens < T
        mask = here[:, None] & inside[None, :]
        at = tokens[:, None] * H + columns[None, :]
        top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        mixed = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for place in tl.range(0, R, num_stages=STAGES):
            pointer = chosen(
                place, row_0_ptr, row_1_ptr, row_2_ptr, row_3_ptr, row_4_ptr, row_5_ptr, row_6_ptr, row_7_ptr,
                row_8_ptr, row_9_ptr, row_10_ptr, row_11_ptr, row_12_ptr, row_13_ptr, row_14_ptr, row_15_ptr,
            )  # fmt: skip
            row = tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(row * row, axis=1) / H + eps)
            logit = tl.sum(row * direction[None, :], axis=1) * rstd
            if KEEP:
                tl.store(rstd_ptr + tl.cast(place, tl.int64) * T + tokens, rstd, mask=here)
                tl.store(logit_ptr + tl.cast(place, tl.int64) * T + tokens, logit, mask=here)
            higher = tl.maximum(top, logit)
            fade, weight = tl.exp(top - higher), tl.exp(logit - higher)
            total = total * fade + weight
            mixed = mixed * fade[:, None] + weight[:, None] * row
            top = higher
        tl.store(y_ptr + at, (mixed / total[:, None]).to(norm.dtype), mask=mask)
        if KEEP:
            tl.store(lse_ptr + tokens, top + tl.log(total), mask=here)


@triton.jit(do_not_specialize=["T", "R"])
def attention_residual_bwd_kernel(
    row_0_ptr,
    row_1_ptr,
    row_2_ptr,
    row_3_ptr,
    row_4_ptr,
    row_5_ptr,
    row_6_ptr,
    row_7_ptr,
    row_8_ptr,
    row_9_ptr,
    row_10_ptr,
    row_11_ptr,
    row_12_ptr,
    row_13_ptr,
    row_14_ptr,
    row_15_ptr,
    drow_0_ptr,
    drow_1_ptr,
    drow_2_ptr,
    drow_3_ptr,
    drow_4_ptr,
    drow_5_ptr,
    drow_6_ptr,
    drow_7_ptr,
    drow_8_ptr,
    drow_9_ptr,
    drow_10_ptr,
    drow_11_ptr,
    drow_12_ptr,
    drow_13_ptr,
    drow_14_ptr,
    drow_15_ptr,
    norm_ptr,
    projection_ptr,
    dy_ptr,
    rstd_ptr,
    logit_ptr,
    lse_ptr,
    partial_ptr,
    T,
    R,
    H,
    WEIGHT_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``drow_r [T, H]`` of every row, and one row of ``partial [P, H]``, the direction's gradient, a program.

    With weights p and e_r = p_r·(dy·row_r - dy·Σ p·row): drow_r = p_r·dy + e_r·s_r·(u - logit_r·s_r·row_r / H),
    du = Σ_tokens Σ_r e_r·s_r·row_r.
    """
    columns = tl.arange(0, COLUMNS)
    inside = columns < H
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0)
    direction = norm.to(tl.float32) * tl.load(projection_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    ddirection = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=1):
        tokens = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        here = tokens < T
        mask = here[:, None] & inside[None, :]
        at = tokens[:, None] * H + columns[None, :]
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + tokens, mask=here, other=0.0)
        mixed = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for place in tl.range(0, R, num_stages=STAGES):
            pointer = chosen(
                place, row_0_ptr, row_1_ptr, row_2_ptr, row_3_ptr, row_4_ptr, row_5_ptr, row_6_ptr, row_7_ptr,
                row_8_ptr, row_9_ptr, row_10_ptr, row_11_ptr, row_12_ptr, row_13_ptr, row_14_ptr, row_15_ptr,
            )  # fmt: skip
            row = tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)
            logit = tl.load(logit_ptr + tl.cast(place, tl.int64) * T + tokens, mask=here, other=0.0)
            mixed += tl.exp(logit - lse)[:, None] * row
        shared = tl.sum(dy * mixed, axis=1)
        for place in tl.range(0, R, num_stages=STAGES):
            pointer = chosen(
                place, row_0_ptr, row_1_ptr, row_2_ptr, row_3_ptr, row_4_ptr, row_5_ptr, row_6_ptr, row_7_ptr,
                row_8_ptr, row_9_ptr, row_10_ptr, row_11_ptr, row_12_ptr, row_13_ptr, row_14_ptr, row_15_ptr,
            )  # fmt: skip
            gradient = chosen(
                place, drow_0_ptr, drow_1_ptr, drow_2_ptr, drow_3_ptr, drow_4_ptr, drow_5_ptr, drow_6_ptr, drow_7_ptr,
                drow_8_ptr, drow_9_ptr, drow_10_ptr, drow_11_ptr, drow_12_ptr, drow_13_ptr, drow_14_ptr, drow_15_ptr,
            )  # fmt: skip
            row = tl.load(pointer + at, mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + tl.cast(place, tl.int64) * T + tokens, mask=here, other=0.0)
            logit = tl.load(logit_ptr + tl.cast(place, tl.int64) * T + tokens, mask=here, other=0.0)
            weight = tl.exp(logit - lse)
            scaled = weight * (tl.sum(dy * row, axis=1) - shared) * rstd
            drow = weight[:, None] * dy + scaled[:, None] * (direction[None, :] - (logit * rstd / H)[:, None] * row)
            tl.store(gradient + at, drow.to(norm.dtype), mask=mask)
            if WEIGHT_GRADIENT:
                ddirection += scaled[:, None] * row
    if WEIGHT_GRADIENT:
        start = tl.cast(tl.program_id(0), tl.int64) * H
        tl.store(partial_ptr + start + columns, tl.sum(ddirection, axis=0), mask=inside)
