# mypy: disable-error-code="no-untyped-def"
"""Backward over selected keys for Hopper, in Gluon: scores to dQ and dK, dV in one pass over the keys.

A program is one query and 64 heads; two groups of four warps. The first gathers, makes S, dP, P, dS and the first half
of dQ's columns; the second makes the other half and the rotated part, then each key's gradient dSᵀ·Q + Pᵀ·dO, 64
columns at a time, which goes from the accumulator registers to the key's row by fp32 atomics. Queries, keys and dO
come with permuted columns (``backward_triton.permuted``): then a thread's four neighbouring values are one 16-byte
addition, and no data moves between threads.

What bounds it (one H200, H 64, K 2048): 15.3 ms at T 8192, 11.9 without the atomics, which alone take 8.8 and hide by
half; two groups of 255 registers are the whole register file and 880 bytes a thread spill. With row sums and
permutation 16.1 ms, 321 TFLOP/s; at T 32768 84.8 ms, 270, for there the sums in fp32 no longer fit the second-level
cache; with 128 heads, two blocks of which add to the same rows at once, 322 and 301. Tried: eight warps for dQ and dK
(does not fit, ptxas serialises the products), pieces of 128 bytes by one more exchange (slower), the rotated dQ in the
first group (faster without atomics, slower with them).

Legend: as in ``hopper``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shardwright.kernels.dsa.attention.hopper import LOG2_E, copy_block, gather, keys_at, rows_at, survey

SECOND_REGISTERS = 240
"""Registers a thread of the second group."""


@gluon.jit
def _own(c):
    """The column that lies at position ``c``: 8i + 2l + e of a group of 16 holds 4l + 2i + e."""
    return c // 16 * 16 + c % 8 // 2 * 4 + c % 16 // 8 * 2 + c % 2


@gluon.jit
def _add_rows(out, rows, columns, a, layout: gl.constexpr):
    """Add 64 x 64 of permuted columns to rows of 576, in place: relabelling, no exchange."""
    v = a.reshape([64, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, 64])
    v = gl.convert_layout(v, layout)
    gl.atomic_add(out + (rows[:, None] * 576 + columns[None, :]), v, sem="relaxed")


@gluon.jit
def _first_group(
    kv_ptr, index_ptr, lse_ptr, delta_ptr, dqn_ptr, scale, COUNT, first, last, walk, whole, spare, qn_tile, qr_tile,
    do_tile, kn_tile, kr_tile, p_tile, ds_tile, keys_free, shares_full, shares_free, BLOCK: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = p_tile.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    heads = gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    lse = gl.load(lse_ptr + heads) * LOG2_E
    delta = gl.load(delta_ptr + heads)
    zero = gl.zeros([64, 64], gl.float32, scores)
    acc = gl.zeros([64, 256], gl.float32, wide)
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, scores))
    gather(kv_ptr, kv_ptr + 512, index_ptr, 0, COUNT, first, last, spare, 576, 576, kn_tile, kr_tile, BLOCK)
    async_copy.commit_group()
    for start in range(0, walk, 64):
        step = start // 64
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        s = warpgroup_mma(qr_tile, kr_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(qn_tile, kn_tile.permute((1, 0)), s, is_async=True)
        dp = warpgroup_mma(do_tile, kn_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        s, dp = warpgroup_mma_wait(0, [s, dp])
        p = gl.exp2(s * (scale * LOG2_E) - lse[:, None])
        ds = p * (dp - delta[:, None]) * scale
        real = (start + columns < walk)[None, :]
        p = gl.where(real, p, 0.0)
        ds = gl.where(real, ds, 0.0)
        if not whole:
            key = keys_at(index_ptr, start + columns, COUNT, first, last, BLOCK)
            p = gl.where((key >= 0)[None, :], p, 0.0)
            ds = gl.where((key >= 0)[None, :], ds, 0.0)
        mbarrier.wait(shares_free, (step & 1) ^ 1)
        p_tile.store(p.to(kind))
        ds_tile.store(ds.to(kind))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(shares_full, count=1)
        acc = warpgroup_mma(ds_tile, kn_tile.slice(0, 256, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.wait(keys_free, step & 1)
        gl.thread_barrier()
        gather(
            kv_ptr, kv_ptr + 512, index_ptr, start + 64, COUNT, first, last, spare, 576, 576, kn_tile, kr_tile, BLOCK
        )
        async_copy.commit_group()
    async_copy.wait_group(0)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    own = _own(gl.arange(0, 256, layout=gl.SliceLayout(0, wide)))
    gl.store(dqn_ptr + rows[:, None] * 512 + own[None, :], acc.to(kind))


@gluon.jit
def _second_group(
    dqn_ptr, dqr_ptr, dkv_ptr, index_ptr, COUNT, first, last, walk, spare, qn_tile, qr_tile, do_tile, kn_tile, kr_tile,
    p_tile, ds_tile, keys_free, shares_full, shares_free, BLOCK: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = p_tile.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    piece: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    # The accumulator's own registers, under the names of the columns that they hold: four neighbours a thread.
    adding: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
    acc = gl.zeros([64, 256], gl.float32, wide)
    rotated = gl.zeros([64, 64], gl.float32, piece)
    zero = gl.zeros([64, 64], gl.float32, piece)
    offsets = gl.arange(0, 64, layout=gl.SliceLayout(1, adding))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, adding))
    for start in range(0, walk, 64):
        step = start // 64
        mbarrier.wait(shares_full, step & 1)
        acc = warpgroup_mma(ds_tile, kn_tile.slice(256, 256, dim=1), acc, is_async=True)
        rotated = warpgroup_mma(ds_tile, kr_tile, rotated, is_async=True)
        acc, rotated = warpgroup_mma_wait(0, [acc, rotated])
        gl.thread_barrier()
        mbarrier.arrive(keys_free, count=1)
        rows = rows_at(index_ptr, start + offsets, COUNT, first, last, spare, BLOCK)  # others add exact zeros
        for c in gl.static_range(8):
            a = warpgroup_mma(
                p_tile.permute((1, 0)), do_tile.slice(c * 64, 64, dim=1), zero, use_acc=False, is_async=True
            )
            a = warpgroup_mma(ds_tile.permute((1, 0)), qn_tile.slice(c * 64, 64, dim=1), a, is_async=True)
            a = warpgroup_mma_wait(0, [a])
            _add_rows(dkv_ptr + c * 64, rows, columns, a, adding)
        a = warpgroup_mma(ds_tile.permute((1, 0)), qr_tile, zero, use_acc=False, is_async=True)
        a = warpgroup_mma_wait(0, [a])
        gl.thread_barrier()
        mbarrier.arrive(shares_free, count=1)
        _add_rows(dkv_ptr + 512, rows, columns, a, adding)
    heads = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    own = _own(gl.arange(0, 256, layout=gl.SliceLayout(0, wide)))
    gl.store(dqn_ptr + 256 + heads[:, None] * 512 + own[None, :], acc.to(kind))
    heads = gl.arange(0, 64, layout=gl.SliceLayout(1, piece))
    own = _own(gl.arange(0, 64, layout=gl.SliceLayout(0, piece)))
    gl.store(dqr_ptr + heads[:, None] * 64 + own[None, :], rotated.to(kind))


@gluon.jit
def hopper_backward_kernel(
    q_ptr, kv_ptr, index_ptr, bounds_ptr, do_ptr, lse_ptr, delta_ptr, dqn_ptr, dqr_ptr, dkv_ptr, scale, COUNT, COLUMNS,
    KEYS, H, POSITIONS: gl.constexpr, BLOCK: gl.constexpr, BOUNDED: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """``dqn [T, H, 512]``, ``dqr [T, H, 64]``; adds to ``dkv [S, 576]`` fp32. q, kv and dO have permuted columns."""
    kind: gl.constexpr = q_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    pid = gl.program_id(0)
    t = (pid // (H // 64)).to(gl.int64)
    row = t * H + pid % (H // 64) * 64
    index_ptr += t * COLUMNS
    first, last, walk, whole, spare = survey(index_ptr, bounds_ptr, t, COUNT, KEYS, BLOCK, BOUNDED, POSITIONS)
    qn_tile = gl.allocate_shared_memory(kind, [64, 512], swizzled)
    qr_tile = gl.allocate_shared_memory(kind, [64, 64], swizzled)
    do_tile = gl.allocate_shared_memory(kind, [64, 512], swizzled)
    kn_tile = gl.allocate_shared_memory(kind, [64, 512], swizzled)
    kr_tile = gl.allocate_shared_memory(kind, [64, 64], swizzled)
    p_tile = gl.allocate_shared_memory(kind, [64, 64], swizzled)
    ds_tile = gl.allocate_shared_memory(kind, [64, 64], swizzled)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    keys_free = gl.allocate_shared_memory(gl.int64, [1], bars)
    shares_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    shares_free = gl.allocate_shared_memory(gl.int64, [1], bars)
    mbarrier.init(keys_free, count=1)
    mbarrier.init(shares_full, count=1)
    mbarrier.init(shares_free, count=1)
    copy_block(q_ptr + row * 576, 576, 512, qn_tile)
    copy_block(q_ptr + row * 576 + 512, 576, 64, qr_tile)
    copy_block(do_ptr + row * 512, 512, 512, do_tile)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_first_group, (
                kv_ptr, index_ptr, lse_ptr + row, delta_ptr + row, dqn_ptr + row * 512, scale, COUNT, first, last, walk,
                whole, spare, qn_tile, qr_tile, do_tile, kn_tile, kr_tile, p_tile, ds_tile, keys_free, shares_full,
                shares_free, BLOCK)),
            (_second_group, (
                dqn_ptr + row * 512, dqr_ptr + row * 64, dkv_ptr, index_ptr, COUNT, first, last, walk, spare, qn_tile,
                qr_tile, do_tile, kn_tile, kr_tile, p_tile, ds_tile, keys_free, shares_full, shares_free, BLOCK)),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip
