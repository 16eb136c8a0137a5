# mypy: disable-error-code="no-untyped-def"
"""Sums over chunks, tiles and places in one launch, for histograms small enough that every program reads them all.

Legend: N entries, E experts, R rows, C chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.permute.triton import write_tiles


@triton.jit(do_not_specialize=["N", "C", "E"])
def whole_place_kernel(
    ids_ptr, rank_ptr, histogram_ptr, counts_ptr, offsets_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr, entry_ptr,
    place_ptr, N, C, E, TILE: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """What ``scan_kernel``, ``tile_kernel`` and ``place_kernel`` give, bit for bit.

    Each program sums the histogram [C, BINS] over all chunks (counts) and over those before its own; the first one
    writes counts, offsets and the tile list.
    """
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    everywhere, earlier = tl.zeros([ROWS, BINS], tl.int32), tl.zeros([ROWS, BINS], tl.int32)
    for first in tl.range(0, C, ROWS):
        rows = first + tl.arange(0, ROWS)
        here = tl.load(histogram_ptr + rows[:, None] * BINS + bins[None, :], mask=(rows < C)[:, None], other=0)
        everywhere += here
        earlier += tl.where((rows < chunk)[:, None], here, 0)
    count = tl.where(bins < E, tl.sum(everywhere, axis=0), 0)
    before = tl.sum(earlier, axis=0)
    offset = tl.cumsum(count, 0) - count
    if chunk == 0:
        tl.store(counts_ptr + bins, count, mask=bins < E)
        write_tiles(count, offset, offsets_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr, E, TILE, STEP, BINS)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + at, mask=at < N, other=-1).to(tl.int32)
    routed = (ids >= 0) & (ids < E)
    row = tl.gather(offset + before, tl.where(routed, ids, 0), 0) + tl.load(rank_ptr + at, mask=at < N, other=0)
    tl.store(entry_ptr + row, at, mask=routed)
    tl.store(place_ptr + at, tl.where(routed, row, -1), mask=at < N)
