# mypy: disable-error-code="no-untyped-def"
"""Forward over selected keys for Hopper, in Gluon: four warps gather keys, eight compute.

A program is one query and 64 heads. The gatherers keep two tiles of 64 keys in flight by ``cp.async``; the computing
warps lie as 4 x 2 over (heads, columns), so scores are made once and the accumulator of 64 x 512 fits registers.
Explicit layouts are why this is Gluon: plain Triton computes the scores twice here, and stops at 295 TFLOP/s.

What bounds it (one H200, T 8192, H 64, K 2048: 4.62 ms, 442 TFLOP/s; T 32768 and H 128 alike): gathering alone takes
2.7 ms out of the second-level cache, the products alone 4.4. Scores of n = 32 columns a warpgroup read shared memory as
fast as it goes, softmax and its barriers stand between the two products, and shared memory is full, so no third tile
can fly. Storing through shared tiles in whole pieces instead of from the accumulators took 0.1 ms off, and 0.35 with
what a backward needs (4.77). Tried and slower: rescaling only when the maximum grows (spills; 355), part of the query
in registers, one group for both roles (no overlap; 394); products carried across tiles are serialised by ptxas.
Not tried: two groups half a step apart, each with its own keys and half of the output's columns.

A slot without a key reads a key that the row has anyway, with share 0: nothing else in memory can reach the output.

Legend: T queries, S keys, H heads, B keys of an entry; 512 columns of the latent, 64 rotated.
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

LATENT, ROPE, HEADS, KEYS = 512, 64, 64, 64
GATHER_REGISTERS = 56
"""Registers a thread of the gatherers; the computing warps get the rest."""

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
LARGEST_SINK = gl.constexpr(2e38)


@gluon.jit
def keys_at(index_ptr, positions, COUNT, first, last, BLOCK: gl.constexpr):
    """Key rows at positions of an expanded selection; -1 outside ``first <= row < last`` and past ``COUNT``."""
    inside = positions < COUNT
    if BLOCK == 1:
        key = gl.load(index_ptr + positions, mask=inside, other=-1)
    else:
        block = gl.load(index_ptr + positions // BLOCK, mask=inside, other=-1)
        key = gl.where((block >= 0) & (block < last), block * BLOCK + positions % BLOCK, -1)
    return gl.where((key >= first) & (key < last), key, -1)


@gluon.jit
def survey(index_ptr, bounds_ptr, t, COUNT, KEYS, BLOCK: gl.constexpr, BOUNDED: gl.constexpr, POSITIONS: gl.constexpr):
    """Of one row: first and past-last key it may see, positions to walk, whether they are whole, a key it has.

    One reduction for rows that are filled from the left: n positions are the first n where they sum to n(n-1)/2.
    """
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    if BOUNDED:
        first = gl.maximum(gl.load(bounds_ptr + 2 * t), 0)
        last = gl.minimum(gl.load(bounds_ptr + 2 * t + 1), KEYS)
    else:
        first = 0
        last = KEYS
    positions = gl.arange(0, POSITIONS, layout=layout)
    key = keys_at(index_ptr, positions, COUNT, first, last, BLOCK)
    packed = gl.sum(gl.where(key >= 0, positions.to(gl.int64) * 65536 + 1, 0), 0)
    count = (packed % 65536).to(gl.int32)
    whole = packed // 65536 == count.to(gl.int64) * (count - 1) // 2
    if whole:
        spare = gl.load(index_ptr) * BLOCK
        walk = count
    else:
        spare = gl.max(key, 0)
        walk = gl.max(gl.where(key >= 0, positions + 1, 0), 0)
    return first, last, walk, whole, gl.maximum(spare, 0)


@gluon.jit
def rows_at(index_ptr, positions, COUNT, first, last, spare, BLOCK: gl.constexpr):
    """As ``keys_at``, with ``spare`` where there is no key."""
    key = keys_at(index_ptr, positions, COUNT, first, last, BLOCK)
    return gl.where(key >= 0, key, spare)


@gluon.jit
def gather(
    kn_ptr, kr_ptr, index_ptr, start, COUNT, first, last, spare, kn_row, kr_row, kn_tile, kr_tile, BLOCK: gl.constexpr
):  # fmt: skip
    """Copy 64 keys to shared memory, both parts; the caller commits or arrives."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    a = start + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    b = start + gl.arange(0, 64, layout=gl.SliceLayout(1, narrow))
    ra = rows_at(index_ptr, a, COUNT, first, last, spare, BLOCK)
    rb = rows_at(index_ptr, b, COUNT, first, last, spare, BLOCK)
    ca = gl.arange(0, 512, layout=gl.SliceLayout(0, wide))
    cb = gl.arange(0, 64, layout=gl.SliceLayout(0, narrow))
    async_copy.async_copy_global_to_shared(kn_tile, kn_ptr + ra[:, None] * kn_row + ca[None, :])
    async_copy.async_copy_global_to_shared(kr_tile, kr_ptr + rb[:, None] * kr_row + cb[None, :])


@gluon.jit
def copy_block(ptr, row, WIDTH: gl.constexpr, tile):
    """64 rows ``row`` values apart to shared memory."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    layout: gl.constexpr = narrow if WIDTH == 64 else wide
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(tile, ptr + r[:, None] * row + c[None, :])


@gluon.jit
def _gatherer(
    kn_ptr, kr_ptr, index_ptr, COUNT, first, last, walk, spare, kn_row, kr_row, kn_tiles, kr_tiles, full, empty,
    BLOCK: gl.constexpr,
):  # fmt: skip
    for start in range(0, walk, 64):
        step = start // 64
        stage = step & 1
        mbarrier.wait(empty.index(stage), ((step >> 1) & 1) ^ 1)
        gather(
            kn_ptr, kr_ptr, index_ptr, start, COUNT, first, last, spare, kn_row, kr_row, kn_tiles.index(stage),
            kr_tiles.index(stage), BLOCK,
        )  # fmt: skip
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def leave(tile, ptr, row, WIDTH: gl.constexpr):
    """64 rows of a shared tile to memory in whole 16-byte pieces; accumulators store half sectors by themselves."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
    for half in gl.static_range(WIDTH // 256):
        value = tile.slice(half * 256, 256, dim=1).load(layout)
        gl.store(ptr + r[:, None] * row + (half * 256 + c)[None, :], value)


@gluon.jit
def _finish(
    o, y_ptr, o_ptr, low_ptr, gate_ptr, rows, o_tile, low_tile, y_tile, GATE: gl.constexpr, SAVE: gl.constexpr
):  # fmt: skip
    """Store the output of 64 heads, gated, and with ``SAVE`` its ungated parts, through tiles that nobody reads now."""
    kind: gl.constexpr = y_ptr.dtype.element_ty
    if GATE == "value":
        copy_block(gate_ptr, 512, 512, y_tile)
        async_copy.commit_group()
        async_copy.wait_group(0)
        gl.thread_barrier()
    rounded = o.to(kind)
    if GATE == "":
        o_tile.store(rounded)
        if SAVE:
            low_tile.store((o - rounded.to(gl.float32)).to(kind))
        gl.thread_barrier()
        leave(o_tile, y_ptr, 512, 512)
    else:
        if SAVE:
            o_tile.store(rounded)
            low_tile.store((o - rounded.to(gl.float32)).to(kind))
        if GATE == "head":
            z = gl.load(gate_ptr + rows).to(gl.float32)
            y_tile.store((o * (1.0 / (1.0 + gl.exp2(-z * LOG2_E)))[:, None]).to(kind))
        else:
            z = y_tile.load(o.type.layout).to(gl.float32)
            y = (o * (1.0 / (1.0 + gl.exp2(-z * LOG2_E)))).to(kind)
            gl.thread_barrier()
            y_tile.store(y)
        gl.thread_barrier()
        leave(y_tile, y_ptr, 512, 512)
        if SAVE:
            leave(o_tile, o_ptr, 512, 512)
    if SAVE:
        leave(low_tile, low_ptr, 512, 512)


@gluon.jit
def _computer(
    y_ptr, o_ptr, low_ptr, lse_ptr, gate_ptr, sinks_ptr, index_ptr, scale, COUNT, first, last, walk, whole, qn_tile,
    qr_tile, kn_tiles, kr_tiles, p_tile, full, empty, BLOCK: gl.constexpr, GATE: gl.constexpr, SINKS: gl.constexpr,
    SAVE: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = p_tile.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 256, 16])
    top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, scores))
    sums = gl.zeros([64, 64], gl.float32, scores)
    zero = gl.zeros([64, 64], gl.float32, scores)
    acc = gl.zeros([64, 512], gl.float32, wide)
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, scores))
    for start in range(0, walk, 64):
        step = start // 64
        stage = step & 1
        mbarrier.wait(full.index(stage), (step >> 1) & 1)
        fence_async_shared()
        k = kn_tiles.index(stage)
        s = warpgroup_mma(qr_tile, kr_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma(qn_tile, k.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        s = gl.where((start + columns < walk)[None, :], s * scale, float("-inf"))
        if not whole:
            key = keys_at(index_ptr, start + columns, COUNT, first, last, BLOCK)
            s = gl.where((key >= 0)[None, :], s, float("-inf"))
        higher = gl.maximum(top, gl.max(s, 1))
        p = gl.exp2(s - higher[:, None])
        shrink = gl.exp2(top - higher)
        top = higher
        sums = sums * shrink[:, None] + p
        p_tile.store(p.to(kind))
        fence_async_shared()
        gl.thread_barrier()
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, wide))[:, None]
        acc = warpgroup_mma(p_tile, k, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    total = gl.sum(sums, 1)
    heads = gl.arange(0, 64, layout=gl.SliceLayout(1, scores))
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    if SINKS:
        sink = gl.load(sinks_ptr + heads).to(gl.float32)
        sink = gl.where(sink > LARGEST_SINK, LARGEST_SINK, sink) * LOG2_E
        higher = gl.maximum(top, sink)
        shrink = gl.exp2(top - higher)
        total = total * shrink + gl.exp2(sink - higher)
        top = higher
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, wide))[:, None]
    total_or_one = gl.where(total == 0, 1.0, total)
    lse = gl.where(total == 0, float("-inf"), (top + gl.log2(total_or_one)) * LN_2)
    gl.store(lse_ptr + heads, lse)
    o = acc / gl.convert_layout(total_or_one, gl.SliceLayout(1, wide))[:, None]
    _finish(
        o, y_ptr, o_ptr, low_ptr, gate_ptr, rows, qn_tile, kn_tiles.index(0), kn_tiles.index(1), GATE, SAVE
    )  # fmt: skip


@gluon.jit
def hopper_forward_kernel(
    qn_ptr, qr_ptr, kn_ptr, kr_ptr, index_ptr, bounds_ptr, gate_ptr, sinks_ptr, y_ptr, o_ptr, low_ptr, lse_ptr, scale,
    COUNT, COLUMNS, KEYS, H, qn_token, qn_head, qr_token, qr_head, kn_row, kr_row,
    POSITIONS: gl.constexpr, BLOCK: gl.constexpr, BOUNDED: gl.constexpr, GATE: gl.constexpr, SINKS: gl.constexpr,
    SAVE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """``y``, ``lse`` and, with ``SAVE``, the ungated output's parts; ``scale`` is in units of log2."""
    kind: gl.constexpr = y_ptr.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    pid = gl.program_id(0)
    t = (pid // (H // 64)).to(gl.int64)
    head = (pid % (H // 64) * 64).to(gl.int64)
    index_ptr += t * COLUMNS
    first, last, walk, whole, spare = survey(index_ptr, bounds_ptr, t, COUNT, KEYS, BLOCK, BOUNDED, POSITIONS)
    qn_tile = gl.allocate_shared_memory(kind, [64, 512], swizzled)
    qr_tile = gl.allocate_shared_memory(kind, [64, 64], swizzled)
    kn_tiles = gl.allocate_shared_memory(kind, [2, 64, 512], swizzled)
    kr_tiles = gl.allocate_shared_memory(kind, [2, 64, 64], swizzled)
    p_tile = gl.allocate_shared_memory(kind, [64, 64], swizzled)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=128)
        mbarrier.init(empty.index(stage), count=1)
    copy_block(qn_ptr + t * qn_token + head * qn_head, qn_head, 512, qn_tile)
    copy_block(qr_ptr + t * qr_token + head * qr_head, qr_head, 64, qr_tile)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    row = t * H + head
    if GATE == "value":
        gate_ptr += row * 512
    if GATE == "head":
        gate_ptr += row
    gl.warp_specialize(
        [
            (_computer, (
                y_ptr + row * 512, o_ptr + row * 512, low_ptr + row * 512, lse_ptr + row, gate_ptr, sinks_ptr + head,
                index_ptr, scale, COUNT, first, last, walk, whole, qn_tile, qr_tile, kn_tiles, kr_tiles, p_tile, full,
                empty, BLOCK, GATE, SINKS, SAVE)),
            (_gatherer, (
                kn_ptr, kr_ptr, index_ptr, COUNT, first, last, walk, spare, kn_row, kr_row, kn_tiles, kr_tiles, full,
                empty, BLOCK)),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip
