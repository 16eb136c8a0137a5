# mypy: disable-error-code="no-untyped-def"
"""Query/key norm + RoPE in Triton: one launch for both, one pass over device memory.

All arithmetic is fp32 with one rounding at each store. The first programs take queries, the others keys. Backward
computes rstd again from the row that it reads anyway.

Legend: T tokens of a batch row, D head width, W rotary width, Q and K heads; ``HALF`` and ``PASS`` as in ``parts``;
``*_sb, *_st, *_sh`` strides of batch, token, head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.qk_norm_rope.parts import load_parts, load_table, load_weight, place, square_sum, store_parts

HALVES: tl.constexpr = tl.constexpr(0)
PAIRS: tl.constexpr = tl.constexpr(1)
PAIRS_TO_HALVES: tl.constexpr = tl.constexpr(2)


@triton.jit
def turn_tile(
    x_ptr, y_ptr, weight_ptr, cos_ptr, sin_ptr, tile, R, T, heads, x_sb, x_st, x_sh, cos_sb, cos_st, sin_sb, sin_st,
    eps, D: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr,
    NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """Norm and rotate ``ROWS`` rows of queries or of keys."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    live = rows < R
    a, b, p = load_parts(x_ptr, place(rows, T, heads, x_sb, x_st, x_sh), live, D, W, LAST, KIND != HALVES, HALF, PASS)
    c1, c2 = load_table(cos_ptr, place(rows, T, heads, cos_sb, cos_st, 0), live, W, WHOLE, HALF)
    s1, s2 = load_table(sin_ptr, place(rows, T, heads, sin_sb, sin_st, 0), live, W, WHOLE, HALF)
    if NORM:
        rstd = tl.rsqrt(square_sum(a, b, p, PASS) / D + eps)[:, None]
        wa, wb, wp = load_weight(weight_ptr, D, W, LAST, KIND != HALVES, UNIT_OFFSET, HALF, PASS)
        a, b, p = a * rstd * wa, b * rstd * wb, p * rstd * wp if PASS > 0 else p
    turned_a, turned_b = a * c1 - b * s1, b * c2 + a * s2
    start = tl.cast(rows, tl.int64) * D
    store_parts(y_ptr, start, live, turned_a, turned_b, p, D, W, LAST, KIND == PAIRS, HALF, PASS)


@triton.jit(do_not_specialize=["RQ", "RK", "T", "tiles"])
def qk_norm_rope_fwd_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, RQ, RK, T, Q, K, tiles, q_sb,
    q_st, q_sh, k_sb, k_st, k_sh, cos_sb, cos_st, sin_sb, sin_st, eps, DQ: tl.constexpr, DK: tl.constexpr,
    W: tl.constexpr, KIND: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr, NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PASS_Q: tl.constexpr, PASS_K: tl.constexpr,
):  # fmt: skip
    """``q_out [RQ, DQ]`` by the first ``tiles`` programs, ``k_out [RK, DK]`` by the others."""
    program = tl.program_id(0)
    if program < tiles:
        turn_tile(q_ptr, q_out_ptr, q_weight_ptr, cos_ptr, sin_ptr, program, RQ, T, Q, q_sb, q_st, q_sh,
                  cos_sb, cos_st, sin_sb, sin_st, eps, DQ, W, KIND, LAST, WHOLE, NORM, UNIT_OFFSET, ROWS, HALF,
                  PASS_Q)  # fmt: skip
    else:
        turn_tile(k_ptr, k_out_ptr, k_weight_ptr, cos_ptr, sin_ptr, program - tiles, RK, T, K, k_sb, k_st, k_sh,
                  cos_sb, cos_st, sin_sb, sin_st, eps, DK, W, KIND, LAST, WHOLE, NORM, UNIT_OFFSET, ROWS, HALF,
                  PASS_K)  # fmt: skip


@triton.jit
def turn_back(
    dy_ptr, x_ptr, dx_ptr, weight_ptr, partial_ptr, cos_ptr, sin_ptr, program, programs, R, T, heads, dy_sb, dy_st,
    dy_sh, x_sb, x_st, x_sh, cos_sb, cos_st, sin_sb, sin_st, eps, D: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PASS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of all tiles of one program, of queries or of keys.

    The rotation's transpose gives dn; with x̂ = x·rstd and g = dn·w: dx = rstd·(g - x̂·mean(g·x̂)), dw = Σ dn·x̂.
    """
    wide: tl.constexpr = PASS if PASS > 0 else HALF
    if NORM:
        wa, wb, wp = load_weight(weight_ptr, D, W, LAST, KIND != HALVES, UNIT_OFFSET, HALF, PASS)
    if WEIGHT_GRADIENT:
        dwa = tl.zeros([ROWS, HALF], dtype=tl.float32)
        dwb = tl.zeros([ROWS, HALF], dtype=tl.float32)
        dwp = tl.zeros([ROWS, wide], dtype=tl.float32)
    for tile in tl.range(program, tl.cdiv(R, ROWS), programs, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        live = rows < R
        dy_at = place(rows, T, heads, dy_sb, dy_st, dy_sh)
        da, db, dp = load_parts(dy_ptr, dy_at, live, D, W, LAST, KIND == PAIRS, HALF, PASS)
        c1, c2 = load_table(cos_ptr, place(rows, T, heads, cos_sb, cos_st, 0), live, W, WHOLE, HALF)
        s1, s2 = load_table(sin_ptr, place(rows, T, heads, sin_sb, sin_st, 0), live, W, WHOLE, HALF)
        dna, dnb = da * c1 + db * s2, db * c2 - da * s1
        if NORM:
            x_at = place(rows, T, heads, x_sb, x_st, x_sh)
            a, b, p = load_parts(x_ptr, x_at, live, D, W, LAST, KIND != HALVES, HALF, PASS)
            rstd = tl.rsqrt(square_sum(a, b, p, PASS) / D + eps)[:, None]
            a, b = a * rstd, b * rstd
            ga, gb = dna * wa, dnb * wb
            along = tl.sum(ga * a, axis=1) + tl.sum(gb * b, axis=1)
            if PASS > 0:
                p = p * rstd
                gp = dp * wp
                along += tl.sum(gp * p, axis=1)
            along = (along / D)[:, None]
            if WEIGHT_GRADIENT:
                dwa += dna * a
                dwb += dnb * b
                if PASS > 0:
                    dwp += dp * p
            dna, dnb = (ga - a * along) * rstd, (gb - b * along) * rstd
            if PASS > 0:
                dp = (gp - p * along) * rstd
        start = tl.cast(rows, tl.int64) * D
        store_parts(dx_ptr, start, live, dna, dnb, dp, D, W, LAST, KIND != HALVES, HALF, PASS)
    if WEIGHT_GRADIENT:
        one = tl.arange(0, 1)
        sa, sb = tl.sum(dwa, axis=0)[None, :], tl.sum(dwb, axis=0)[None, :]
        sp = tl.sum(dwp, axis=0)[None, :]
        start = (tl.cast(program, tl.int64) + one) * D
        store_parts(partial_ptr, start, one == 0, sa, sb, sp, D, W, LAST, KIND != HALVES, HALF, PASS)


@triton.jit(do_not_specialize=["RQ", "RK", "T", "PQ", "PK"])
def qk_norm_rope_bwd_kernel(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, dq_ptr, dk_ptr, q_weight_ptr, k_weight_ptr, q_partial_ptr, k_partial_ptr,
    cos_ptr, sin_ptr, RQ, RK, T, Q, K, PQ, PK, dq_sb, dq_st, dq_sh, dk_sb, dk_st, dk_sh, q_sb, q_st, q_sh, k_sb,
    k_st, k_sh, cos_sb, cos_st, sin_sb, sin_st, eps, DQ: tl.constexpr, DK: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PASS_Q: tl.constexpr,
    PASS_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``dq [RQ, DQ]`` and rows of ``q_partial [PQ, DQ]`` by the first ``PQ`` programs, keys by the others."""
    program = tl.program_id(0)
    if program < PQ:
        turn_back(dq_out_ptr, q_ptr, dq_ptr, q_weight_ptr, q_partial_ptr, cos_ptr, sin_ptr, program, PQ, RQ, T, Q,
                  dq_sb, dq_st, dq_sh, q_sb, q_st, q_sh, cos_sb, cos_st, sin_sb, sin_st, eps, DQ, W, KIND, LAST,
                  WHOLE, NORM, UNIT_OFFSET, WEIGHT_GRADIENT, ROWS, HALF, PASS_Q, STAGES)  # fmt: skip
    else:
        turn_back(dk_out_ptr, k_ptr, dk_ptr, k_weight_ptr, k_partial_ptr, cos_ptr, sin_ptr, program - PQ, PK, RK, T,
                  K, dk_sb, dk_st, dk_sh, k_sb, k_st, k_sh, cos_sb, cos_st, sin_sb, sin_st, eps, DK, W, KIND, LAST,
                  WHOLE, NORM, UNIT_OFFSET, WEIGHT_GRADIENT, ROWS, HALF, PASS_K, STAGES)  # fmt: skip
