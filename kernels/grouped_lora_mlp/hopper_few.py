# mypy: disable-error-code="no-untyped-def"
"""A consumer of the Hopper product with few rows: weights on the wide side of the matrix units, rows on the other.

The wide side takes 64 at once, the other any multiple of 8. So the last rows of an expert, where they are no more than
32, cost half of what 64 padded rows cost. Their sums lie across: columns first.

Legend: R rows, K depth, r rank.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

FEW_ROWS, MOST_RANK = 32, 32
"""Rows; and the largest rank whose z of so many rows fits into shared memory beside B."""


@gluon.constexpr_function
def few_rows(lora, rank):
    """Rows up to which a consumer works across; 0 where none does."""
    return FEW_ROWS if not lora or rank <= MOST_RANK else 0


@gluon.jit
def sums_across(
    z_ptr, first, last, step, done, K, xs, ws, bs, zs, full, empty, b_full, b_empty, ME: gl.constexpr,
    STAGES: gl.constexpr, GATHER: gl.constexpr, N_FIRST: gl.constexpr, LORA: gl.constexpr, B_N_FIRST: gl.constexpr,
    RANK: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """Sums of a consumer's last rows, no more than FEW: [128 columns, FEW rows] for each run of columns."""
    matrix: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, FEW, 16])
    if LORA:
        along: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
        rows = first + gl.arange(0, FEW, layout=gl.SliceLayout(1, along))
        ranks = gl.arange(0, RANK, layout=gl.SliceLayout(0, along))
        z = gl.load(z_ptr + rows.to(gl.int64)[:, None] * RANK + ranks[None, :], (rows < last)[:, None], 0.0)
        zs.index(ME).store(z)
        fence_async_shared()
        gl.thread_barrier()
    a = gl.zeros([128, FEW], gl.float32, matrix)
    b = gl.zeros([128, FEW], gl.float32, matrix)
    for k in range(0, K, 64):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        if GATHER:
            fence_async_shared()
        x = xs.index(stage * 3 + ME).slice(0, FEW).permute((1, 0))
        wa, wb = ws.index(stage * 2), ws.index(stage * 2 + 1)
        if not N_FIRST:
            wa, wb = wa.permute((1, 0)), wb.permute((1, 0))
        flying_a = warpgroup_mma(wa, x, a, use_acc=k > 0, is_async=True)
        flying_b = warpgroup_mma(wb, x, b, use_acc=k > 0, is_async=True)
        a, b = warpgroup_mma_wait(0, [flying_a, flying_b])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    if LORA:
        mbarrier.wait(b_full, done & 1)
        ba, bb, z_across = bs.index(0), bs.index(1), zs.index(ME).permute((1, 0))
        if not B_N_FIRST:
            ba, bb = ba.permute((1, 0)), bb.permute((1, 0))
        flying_a = warpgroup_mma(ba, z_across, a, is_async=True)
        flying_b = warpgroup_mma(bb, z_across, b, is_async=True)
        a, b = warpgroup_mma_wait(0, [flying_a, flying_b])
        gl.thread_barrier()
        mbarrier.arrive(b_empty, count=1)
    return a, b
