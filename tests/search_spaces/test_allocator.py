"""The model of torch's caching allocator, by its published rules (``c10/cuda/CUDACachingAllocator.cpp``)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.search_spaces.cost.allocator import MIB, Block, CachingAllocator, rounded, segment_bytes


@pytest.mark.parametrize(
    ("asked", "counted"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (10**9, 1_000_000_000)]
)
def test_sizes_are_counted_in_steps_of_512(asked: int, counted: int) -> None:
    assert rounded(asked) == counted
    allocator = CachingAllocator()
    allocator.take(asked)
    assert allocator.allocated == counted


@pytest.mark.parametrize(
    ("size", "segment"),
    [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12), (100 * MIB + 512, 102)],
)
def test_segments_of_fixed_size(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment * MIB
    allocator = CachingAllocator(grows=False)
    allocator.take(size)
    assert allocator.reserved == segment * MIB


def test_a_large_rest_is_split_off_only_above_1_mib() -> None:
    fixed, growing = CachingAllocator(grows=False), CachingAllocator()
    for allocator, counted in ((fixed, 16), (growing, 15)):
        allocator.take(15 * MIB)  # a segment of 16 MiB: the rest of 1 MiB stays with the block
        assert allocator.allocated == counted * MIB
    one, other = CachingAllocator(grows=False), CachingAllocator(grows=False)
    for allocator in (one, other):
        allocator.free(allocator.take(20 * MIB))
    one.take(19 * MIB)
    assert one.allocated == 20 * MIB
    other.take(19 * MIB - 512)
    assert other.allocated == 19 * MIB - 512


def test_the_smallest_block_that_fits_is_taken_and_the_lowest_of_equal_ones() -> None:
    allocator = CachingAllocator(grows=False)
    wide, narrow, same = (allocator.take(size * MIB) for size in (64, 40, 40))
    for block in (wide, same, narrow):
        allocator.free(block)
    assert allocator.take(40 * MIB).address == min(narrow.address, same.address)
    assert allocator.take(40 * MIB).address == max(narrow.address, same.address)
    assert allocator.take(30 * MIB).address == wide.address
    assert allocator.reserved == 144 * MIB


def test_segments_grow_by_pages_behind_what_is_free() -> None:
    allocator = CachingAllocator()
    first = allocator.take(30 * MIB)
    assert allocator.reserved == 40 * MIB
    second = allocator.take(25 * MIB)  # 10 MiB are free at the end: 15 more, one page
    assert (second.address - first.address, allocator.reserved) == (30 * MIB, 60 * MIB)
    allocator.free(first)
    third = allocator.take(31 * MIB)  # the hole of 30 MiB is too small
    assert (third.address - second.address, allocator.reserved) == (25 * MIB, 100 * MIB)
    small = allocator.take(MIB)
    assert allocator.reserved == 102 * MIB
    assert small.pool is not first.pool


def test_the_free_end_of_a_growing_segment_is_taken_last() -> None:
    """It counts as large as it can grow, so a wider hole is the better fit."""
    allocator = CachingAllocator()
    low, wall, end = (allocator.take(size * MIB) for size in (60, 20, 40))
    allocator.free(low)
    allocator.free(end)
    assert allocator.take(40 * MIB).address == low.address
    assert allocator.take(40 * MIB).address == end.address
    assert wall.address == low.address + 60 * MIB
    fixed = CachingAllocator(grows=False)
    blocks = [fixed.take(size * MIB) for size in (60, 20, 40)]
    fixed.free(blocks[0])
    fixed.free(blocks[2])
    assert fixed.take(40 * MIB).address == blocks[2].address


def test_streams_have_pools_of_their_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.take(40 * MIB, stream=1))
    allocator.take(40 * MIB, stream=2)
    assert allocator.reserved == 80 * MIB


def test_emptying_the_cache_takes_whole_pages_and_whole_segments() -> None:
    growing = CachingAllocator()
    low, high = growing.take(30 * MIB), growing.take(30 * MIB)
    growing.free(low)
    growing.empty_cache()  # of 0 to 30 MiB the page from 20 on is half taken
    assert growing.reserved == 40 * MIB
    assert growing.take(10 * MIB).address == low.address + 20 * MIB
    again = growing.take(20 * MIB)
    assert (again.address, growing.reserved) == (low.address, 60 * MIB)
    assert high.address == low.address + 30 * MIB
    fixed = CachingAllocator(grows=False)
    kept, alone = fixed.take(4 * MIB), fixed.take(64 * MIB)
    fixed.free(alone)
    fixed.empty_cache()
    assert (fixed.reserved, kept.free) == (20 * MIB, False)


def test_unequal_blocks_leave_a_hole() -> None:
    """An eager loss, in units of the bf16 logits: 12 are in use at most, 14 are held.

    The fp32 gradient of log-softmax's output leaves 2 of the 6 that logits and their copy gave back; that of the logits
    does not fit there.
    """
    unit, allocator = 100 * MIB, CachingAllocator()
    logits, copy, kept = (allocator.take(size * unit) for size in (2, 4, 4))
    allocator.free(logits)
    allocator.free(copy)
    allocator.take(4 * unit)
    allocator.take(4 * unit)
    assert (allocator.peak, allocator.peak_reserved) == (12 * unit, 14 * unit)
    assert not kept.free


@given(
    grows=st.booleans(),
    sizes=st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 1), st.integers(0, 7)), max_size=60),
)
def test_blocks_never_overlap_and_everything_comes_back(grows: bool, sizes: list[tuple[int, int, int]]) -> None:
    allocator = CachingAllocator(grows)
    live: list[Block] = []
    for size, stream, gone in sizes:
        block = allocator.take(size, stream)
        assert block.size >= size
        for other in live:
            apart = block.address + block.size <= other.address or other.address + other.size <= block.address
            assert apart
        live.append(block)
        if gone < len(live):
            allocator.free(live.pop(gone))
        assert sum(one.size for one in live) == allocator.allocated <= allocator.reserved
        assert allocator.peak_reserved >= allocator.peak >= allocator.allocated
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)
