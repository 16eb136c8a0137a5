# mypy: disable-error-code="no-untyped-def"
"""The grouped product for Hopper: one producer and three consumer warpgroups, in Gluon.

One block a multiprocessor walks over tiles of up to 192 rows of one expert times 256 weight columns. The producer
keeps ``STAGES`` steps of depth 64 in flight: weights by bulk tensor copies, rows by tensor copies where they lie in
expert order, by ``cp.async`` where they are gathered from tokens. Each consumer owns 64 rows and all columns of a
tile, so rows are padded to 64 (to 32 where a consumer has no more: ``hopper_few``) and a consumer whose rows run out
waits; its two accumulators hold two runs of 128 columns. Loads of the next tile run under the epilogue of this one.

Why this shape (one H200): 192 x 256 moves 0.0091 bytes an operation out of the 2nd-level cache, where 128 x 256
moves 0.0117 and is bound by it; rows on the M side keep a stored row whole; three consumers share one weight tile.

``FUSE`` makes ``h = act(gate, up)`` in the epilogue: the two runs of columns are then a gate and its up run, or one
interleaved run each. The adapter's term is one more matrix step: z from registers, B through its own buffer.

Legend: R rows, E experts, N weight columns, K depth, I width of h, r rank.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shardwright.kernels.grouped_lora_mlp.hopper_epilogue import copy_layout, finish, finish_across
from shardwright.kernels.grouped_lora_mlp.hopper_few import few_rows, sums_across

ROWS, RUN, DEPTH, CONSUMERS, STAGES = 64, 128, 64, 3, 3
"""Rows of a consumer, columns of an accumulator, depth of a step, consumers, steps in flight."""
CONSUMER_REGISTERS = 160
"""3 x 128 threads of 160 leave 32 for each of the producer's: 65,536 in all. With 152 the accumulators spill; with 32
a producer that gathers spills a few row addresses."""


@gluon.jit
def _tile(program, tiles, columns, GROUP: gl.constexpr):
    """Program → (row tile, column tile): ``GROUP`` row tiles share a weight tile before the next column."""
    group = program // (GROUP * columns)
    first = group * GROUP
    size = gl.minimum(tiles - first, GROUP)
    inside = program % (GROUP * columns)
    return first + inside % size, inside // size


@gluon.jit
def _runs(column, I, FUSE: gl.constexpr, HALVES: gl.constexpr):
    """First weight columns of a tile's two runs: gate and up for fused halves, else neighbours."""
    if FUSE and HALVES:
        return column * 128, I + column * 128
    else:
        return column * 256, column * 256 + 128


@gluon.jit
def _tokens(entry_ptr, first, last, SLOTS):
    """The tokens of 64 rows; -1 for rows past the tile's end."""
    rows = first + gl.arange(0, 64, layout=gl.SliceLayout(1, copy_layout()))
    entry = gl.load(entry_ptr + rows, mask=rows < last, other=-1)
    return gl.where(entry < 0, -1, entry // SLOTS)


@gluon.jit
def _gather(x_ptr, tokens, k, K, place):
    """64 columns of the tokens' rows; zeros for rows of no token, which cost no traffic and little power."""
    depth = k + gl.arange(0, 64, layout=gl.SliceLayout(0, copy_layout()))
    at = x_ptr + tokens.to(gl.int64)[:, None] * K + depth[None, :]
    async_copy.async_copy_global_to_shared(place, at, mask=(tokens >= 0)[:, None])


@gluon.jit
def _producer(
    x_desc, x_ptr, w_desc, b_desc, entry_ptr, expert_ptr, first_ptr, last_ptr, tiles, columns, I, K, SLOTS, w_rows,
    b_rows, xs, ws, bs, full, empty, b_full, b_empty, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, GATHER: gl.constexpr, N_FIRST: gl.constexpr, FUSE: gl.constexpr, HALVES: gl.constexpr,
    LORA: gl.constexpr, B_N_FIRST: gl.constexpr,
):  # fmt: skip
    WEIGHT_BYTES: gl.constexpr = 2 * w_desc.block_type.nbytes
    ROW_BYTES: gl.constexpr = x_desc.block_type.nbytes
    step, done = 0, 0
    for program in range(gl.program_id(0), tiles * columns, PROGRAMS):
        tile, column = _tile(program, tiles, columns, GROUP)
        expert, first, last = gl.load(expert_ptr + tile), gl.load(first_ptr + tile), gl.load(last_ptr + tile)
        n0, n1 = _runs(column, I, FUSE, HALVES)
        blocks = gl.minimum((last - first + 63) // 64, 3)
        if GATHER:
            t0 = _tokens(entry_ptr, first, last, SLOTS)
            t1 = _tokens(entry_ptr, first + 64, last, SLOTS)
            t2 = _tokens(entry_ptr, first + 128, last, SLOTS)
        for k in range(0, K, 64):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            if GATHER:
                mbarrier.expect(bar, WEIGHT_BYTES)
            else:
                mbarrier.expect(bar, WEIGHT_BYTES + ROW_BYTES, pred=blocks == 1)
                mbarrier.expect(bar, WEIGHT_BYTES + 2 * ROW_BYTES, pred=blocks == 2)
                mbarrier.expect(bar, WEIGHT_BYTES + 3 * ROW_BYTES, pred=blocks == 3)
            if N_FIRST:
                tma.async_copy_global_to_shared(w_desc, [expert * w_rows + n0, k], bar, ws.index(stage * 2))
                tma.async_copy_global_to_shared(w_desc, [expert * w_rows + n1, k], bar, ws.index(stage * 2 + 1))
            else:
                tma.async_copy_global_to_shared(w_desc, [expert * w_rows + k, n0], bar, ws.index(stage * 2))
                tma.async_copy_global_to_shared(w_desc, [expert * w_rows + k, n1], bar, ws.index(stage * 2 + 1))
            if GATHER:
                _gather(x_ptr, t0, k, K, xs.index(stage * 3))
                if blocks > 1:
                    _gather(x_ptr, t1, k, K, xs.index(stage * 3 + 1))
                if blocks > 2:
                    _gather(x_ptr, t2, k, K, xs.index(stage * 3 + 2))
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                tma.async_copy_global_to_shared(x_desc, [first, k], bar, xs.index(stage * 3))
                if blocks > 1:
                    tma.async_copy_global_to_shared(x_desc, [first + 64, k], bar, xs.index(stage * 3 + 1))
                if blocks > 2:
                    tma.async_copy_global_to_shared(x_desc, [first + 128, k], bar, xs.index(stage * 3 + 2))
            step += 1
        if LORA:
            # B of this tile goes out behind its last step: the consumers have left the last tile's B by then.
            mbarrier.wait(b_empty, (done & 1) ^ 1)
            mbarrier.expect(b_full, 2 * b_desc.block_type.nbytes)
            if B_N_FIRST:
                tma.async_copy_global_to_shared(b_desc, [expert * b_rows + n0, 0], b_full, bs.index(0))
                tma.async_copy_global_to_shared(b_desc, [expert * b_rows + n1, 0], b_full, bs.index(1))
            else:
                tma.async_copy_global_to_shared(b_desc, [expert * b_rows, n0], b_full, bs.index(0))
                tma.async_copy_global_to_shared(b_desc, [expert * b_rows, n1], b_full, bs.index(1))
            done += 1
    if GATHER:
        async_copy.commit_group()
        async_copy.wait_group(0)


@gluon.jit
def _consumer(
    y_ptr, h_ptr, z_ptr, bias_ptr, expert_ptr, first_ptr, last_ptr, tiles, columns, N, I, K, xs, ws, bs, zs, staging,
    full, empty, b_full, b_empty, ME: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
    GATHER: gl.constexpr, N_FIRST: gl.constexpr, FUSE: gl.constexpr, HALVES: gl.constexpr, SAVE: gl.constexpr,
    LORA: gl.constexpr, BIAS: gl.constexpr, B_N_FIRST: gl.constexpr, RANK: gl.constexpr, KIND: gl.constexpr,
    P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    matrix: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    rank: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=matrix, k_width=2)
    step, done = 0, 0
    for program in range(gl.program_id(0), tiles * columns, PROGRAMS):
        tile, column = _tile(program, tiles, columns, GROUP)
        first, last = gl.load(first_ptr + tile) + 64 * ME, gl.load(last_ptr + tile)
        if last > first + FEW:
            if LORA:
                rows = first + gl.arange(0, 64, layout=gl.SliceLayout(1, rank))
                ranks = gl.arange(0, RANK, layout=gl.SliceLayout(0, rank))
                z = gl.load(z_ptr + rows.to(gl.int64)[:, None] * RANK + ranks[None, :], (rows < last)[:, None], 0.0)
            a = gl.zeros([64, 128], gl.float32, matrix)
            b = gl.zeros([64, 128], gl.float32, matrix)
            for k in range(0, K, 64):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                if GATHER:
                    fence_async_shared()
                x, wa, wb = xs.index(stage * 3 + ME), ws.index(stage * 2), ws.index(stage * 2 + 1)
                if N_FIRST:
                    wa, wb = wa.permute((1, 0)), wb.permute((1, 0))
                flying_a = warpgroup_mma(x, wa, a, use_acc=k > 0, is_async=True)
                flying_b = warpgroup_mma(x, wb, b, use_acc=k > 0, is_async=True)
                a, b = warpgroup_mma_wait(0, [flying_a, flying_b])
                gl.thread_barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
            if LORA:
                mbarrier.wait(b_full, done & 1)
                ba, bb = bs.index(0), bs.index(1)
                if B_N_FIRST:
                    ba, bb = ba.permute((1, 0)), bb.permute((1, 0))
                flying_a = warpgroup_mma(z, ba, a, is_async=True)
                flying_b = warpgroup_mma(z, bb, b, is_async=True)
                a, b = warpgroup_mma_wait(0, [flying_a, flying_b])
                gl.thread_barrier()
                mbarrier.arrive(b_empty, count=1)
                done += 1
            n0, n1 = _runs(column, I, FUSE, HALVES)
            bias_at = bias_ptr
            if BIAS:
                bias_at += gl.load(expert_ptr + tile).to(gl.int64) * N
            finish(
                a, b, y_ptr, h_ptr, bias_at, staging, first, last, column, n0, n1, N, I, FUSE, HALVES, SAVE, BIAS, KIND,
                P0, P1, P2,
            )  # fmt: skip
        elif FEW > 0 and last > first:
            n0, n1 = _runs(column, I, FUSE, HALVES)
            a, b = sums_across(
                z_ptr, first, last, step, done, K, xs, ws, bs, zs, full, empty, b_full, b_empty, ME, STAGES, GATHER,
                N_FIRST, LORA, B_N_FIRST, RANK, FEW,
            )  # fmt: skip
            step += K // 64
            if LORA:
                done += 1
            bias_at = bias_ptr
            if BIAS:
                bias_at += gl.load(expert_ptr + tile).to(gl.int64) * N
            finish_across(
                a, b, y_ptr, h_ptr, bias_at, staging.slice(0, FEW), first, last, column, n0, n1, N, I, FUSE, HALVES,
                SAVE, BIAS, KIND, P0, P1, P2,
            )  # fmt: skip
        else:
            for _ in range(0, K, 64):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
            if LORA:
                mbarrier.wait(b_full, done & 1)
                mbarrier.arrive(b_empty, count=1)
                done += 1


@gluon.jit(do_not_specialize=["SLOTS"])
def hopper_product_kernel(
    x_desc, x_ptr, w_desc, b_desc, y_ptr, h_ptr, z_ptr, bias_ptr, entry_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr,
    N, I, K, SLOTS, w_rows, b_rows, STAGES: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
    REGISTERS: gl.constexpr, GATHER: gl.constexpr, N_FIRST: gl.constexpr, FUSE: gl.constexpr, HALVES: gl.constexpr,
    SAVE: gl.constexpr, LORA: gl.constexpr, BIAS: gl.constexpr, B_N_FIRST: gl.constexpr, RANK: gl.constexpr,
    KIND: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, P2: gl.constexpr,
):  # fmt: skip
    """``y [R, N] = x Wᵀ (+ z Bᵀ) (+ bias)`` and, with ``FUSE``, ``h [R, I]`` of it; y is stored only with ``SAVE``."""
    kind: gl.constexpr = x_desc.dtype
    xs = gl.allocate_shared_memory(kind, [STAGES * 3, 64, 64], x_desc.layout)
    ws = gl.allocate_shared_memory(kind, [STAGES * 2, 128, 64] if N_FIRST else [STAGES * 2, 64, 128], w_desc.layout)
    staging = gl.allocate_shared_memory(kind, [3, 64, 64], x_desc.layout)
    if LORA:
        bs = gl.allocate_shared_memory(kind, [2, 128, RANK] if B_N_FIRST else [2, RANK, 128], b_desc.layout)
    else:
        bs = staging
    FEW: gl.constexpr = few_rows(LORA, RANK)
    if LORA and FEW > 0:
        zs = gl.allocate_shared_memory(kind, [3, FEW, RANK], gl.NVMMASharedLayout.get_default_for([FEW, RANK], kind))
    else:
        zs = staging
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    b_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    b_empty = gl.allocate_shared_memory(gl.int64, [1], bars)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=129 if GATHER else 1)  # the producer's 128 threads, and the copies
        mbarrier.init(empty.index(stage), count=3)
    mbarrier.init(b_full, count=1)
    mbarrier.init(b_empty, count=3)
    tiles = gl.load(tiles_ptr)
    columns = ((I if FUSE and HALVES else N) + (127 if FUSE and HALVES else 255)) // (128 if FUSE and HALVES else 256)
    gl.warp_specialize(
        [
            (_producer, (
                x_desc, x_ptr, w_desc, b_desc, entry_ptr, expert_ptr, first_ptr, last_ptr, tiles, columns, I, K, SLOTS,
                w_rows, b_rows, xs, ws, bs, full, empty, b_full, b_empty, STAGES, GROUP, PROGRAMS, GATHER, N_FIRST,
                FUSE, HALVES, LORA, B_N_FIRST)),
            (_consumer, (
                y_ptr, h_ptr, z_ptr, bias_ptr, expert_ptr, first_ptr, last_ptr, tiles, columns, N, I, K, xs, ws, bs, zs,
                staging.index(0), full, empty, b_full, b_empty, 0, STAGES, GROUP, PROGRAMS, GATHER, N_FIRST, FUSE,
                HALVES, SAVE, LORA, BIAS, B_N_FIRST, RANK, KIND, P0, P1, P2, FEW)),
            (_consumer, (
                y_ptr, h_ptr, z_ptr, bias_ptr, expert_ptr, first_ptr, last_ptr, tiles, columns, N, I, K, xs, ws, bs, zs,
                staging.index(1), full, empty, b_full, b_empty, 1, STAGES, GROUP, PROGRAMS, GATHER, N_FIRST, FUSE,
                HALVES, SAVE, LORA, BIAS, B_N_FIRST, RANK, KIND, P0, P1, P2, FEW)),
            (_consumer, (
                y_ptr, h_ptr, z_ptr, bias_ptr, expert_ptr, first_ptr, last_ptr, tiles, columns, N, I, K, xs, ws, bs, zs,
                staging.index(2), full, empty, b_full, b_empty, 2, STAGES, GROUP, PROGRAMS, GATHER, N_FIRST, FUSE,
                HALVES, SAVE, LORA, BIAS, B_N_FIRST, RANK, KIND, P0, P1, P2, FEW)),
        ],
        [4, 4, 4],
        [REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip
