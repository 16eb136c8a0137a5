# mypy: disable-error-code="no-untyped-def"
"""The first launch of a forward: the tile list, and zeros for rows that belong to no expert.

Legend: R rows, E experts, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.permute.triton import write_tiles


@triton.jit(do_not_specialize=["R", "E"])
def begin_kernel(
    counts_ptr, offsets_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr, y_ptr, R, E, TILE: tl.constexpr,
    STEP: tl.constexpr, BINS: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What ``tile_kernel`` and ``zero_tail_kernel`` give, bit for bit, from ``counts [E]`` and for ``y [R, H]``.

    The first program writes the list. Each other one finds the end of the last expert's rows by itself, so it waits
    for nobody, and zeroes what of its ``ROWS`` rows lies after it.
    """
    bins = tl.arange(0, BINS)
    count = tl.load(counts_ptr + bins, mask=bins < E, other=0)
    count = tl.minimum(tl.maximum(count, 0), R).to(tl.int64)
    program = tl.program_id(0)
    if program == 0:
        ends = tl.cumsum(count, 0)
        offset = tl.minimum(ends - count, R).to(tl.int32)
        mine = tl.minimum(ends, R).to(tl.int32) - offset
        write_tiles(mine, offset, offsets_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr, E, TILE, STEP, BINS)
    else:
        end = tl.minimum(tl.sum(count, 0), R).to(tl.int32)
        start = (program - 1) * ROWS
        stop = tl.minimum(start + ROWS, R)
        columns = tl.arange(0, COLUMNS)
        for row in tl.range(tl.maximum(start, end), stop):
            at = y_ptr + tl.cast(row, tl.int64) * H
            for c in tl.range(0, H, COLUMNS):
                tl.store(at + c + columns, tl.zeros([COLUMNS], y_ptr.dtype.element_ty), mask=c + columns < H)
