# mypy: disable-error-code="no-untyped-def"
"""Latent norm in Triton: one pass over the joint rows.

Forward reads the joint projection where it lies and writes the normed latent and the rest, both dense. Backward
reads both gradients where they lie and writes the gradient of the whole joint row once. The weight gradient stays
in fp32 registers of a program; RMSNorm's second kernel adds the programs' partial sums in a fixed order.

Legend: R rows, W width of the joint projection, H width of the latent, P partial sums; ``*_m``, ``*_i``, ``*_so``,
``*_sm``, ``*_si`` the steps between rows (``gated_rms_norm.rows``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.gated_rms_norm.triton import row_starts
from shardwright.kernels.rms_norm.triton import norm_gradient


@triton.jit(do_not_specialize=["R"])
def latent_norm_fwd_kernel(
    joint_ptr,
    weight_ptr,
    latent_ptr,
    rest_ptr,
    rstd_ptr,
    joint_m,
    joint_i,
    joint_so,
    joint_sm,
    joint_si,
    R,
    W,
    H,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``latent [R, H]``, ``rest [R, W - H]`` and ``rstd [R]`` (fp32) from ``joint`` and ``weight [H]``."""
    columns, others = tl.arange(0, COLUMNS), tl.arange(0, REST)
    inside, beside = columns < H, others < W - H
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        live = rows < R
        start = row_starts(rows, joint_m, joint_i, joint_so, joint_sm, joint_si)[:, None]
        mask, rest_mask = live[:, None] & inside[None, :], live[:, None] & beside[None, :]
        x = tl.load(joint_ptr + start + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        rest = tl.load(joint_ptr + start + H + others[None, :], mask=rest_mask, other=0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)
        normalised = (x * rstd[:, None]).to(weight.dtype)
        at = tl.cast(rows, tl.int64)[:, None]
        tl.store(latent_ptr + at * H + columns[None, :], normalised * weight[None, :], mask=mask)
        tl.store(rest_ptr + at * (W - H) + others[None, :], rest, mask=rest_mask)
        tl.store(rstd_ptr + rows, rstd, mask=live)


@triton.jit(do_not_specialize=["R"])
def latent_norm_bwd_kernel(
    dlatent_ptr,
    drest_ptr,
    joint_ptr,
    weight_ptr,
    rstd_ptr,
    djoint_ptr,
    partial_ptr,
    dlatent_m,
    dlatent_i,
    dlatent_so,
    dlatent_sm,
    dlatent_si,
    drest_m,
    drest_i,
    drest_so,
    drest_sm,
    drest_si,
    joint_m,
    joint_i,
    joint_so,
    joint_sm,
    joint_si,
    R,
    W,
    H,
    eps,
    SINGLE: tl.constexpr,
    LATENT_GRADIENT: tl.constexpr,
    REST_GRADIENT: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``djoint [R, W]``, and one row of ``partial [P, H]`` (fp32) a program where the weight learns.

    With x̂ = x·rstd and g = dlatent·w: dx = rstd·(g - x̂·mean(g·x̂)), dw = Σ_rows dlatent·x̂. An output that
    nobody used has no gradient: its columns are zeros.
    """
    columns, others = tl.arange(0, COLUMNS), tl.arange(0, REST)
    inside, beside = columns < H, others < W - H
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = djoint_ptr.dtype.element_ty
    dweight = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        live = rows < R
        mask, rest_mask = live[:, None] & inside[None, :], live[:, None] & beside[None, :]
        at = tl.cast(rows, tl.int64)[:, None] * W
        if LATENT_GRADIENT:
            start = row_starts(rows, joint_m, joint_i, joint_so, joint_sm, joint_si)[:, None]
            dstart = row_starts(rows, dlatent_m, dlatent_i, dlatent_so, dlatent_sm, dlatent_si)[:, None]
            x = tl.load(joint_ptr + start + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            dlatent = tl.load(dlatent_ptr + dstart + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + rows, mask=live, other=0.0)
            normalised = x * rstd[:, None]
            scaled = dlatent * weight[None, :]
            dx = norm_gradient(scaled, normalised, rstd, eps, H, SINGLE)
            if WEIGHT_GRADIENT:
                dweight += dlatent * normalised
        else:
            dx = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        tl.store(djoint_ptr + at + columns[None, :], dx.to(kind), mask=mask)
        if REST_GRADIENT:
            rest_start = row_starts(rows, drest_m, drest_i, drest_so, drest_sm, drest_si)[:, None]
            drest = tl.load(drest_ptr + rest_start + others[None, :], mask=rest_mask, other=0.0)
        else:
            drest = tl.zeros([ROWS, REST], dtype=kind)
        tl.store(djoint_ptr + at + H + others[None, :], drest, mask=rest_mask)
    if WEIGHT_GRADIENT:
        start = tl.cast(tl.program_id(0), tl.int64) * H
        tl.store(partial_ptr + start + columns, tl.sum(dweight, axis=0), mask=inside)
