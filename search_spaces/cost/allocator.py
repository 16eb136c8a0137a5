"""torch's caching allocator of CUDA memory, block by block: what a sequence of sizes and frees makes it hold.

The allocator is deterministic. Its published rules (``c10/cuda/CUDACachingAllocator.cpp``), all of them here but what
needs a full device:

* sizes are rounded up to 512 bytes; up to 1 MiB they come from one pool, above from another; each stream has its own;
* the smallest free block that is large enough is taken, the lowest of equal ones, and its upper rest is split off;
* a freed block is joined with free neighbours of its segment;
* segments of fixed size: 2 MiB for small sizes, 20 MiB below 10 MiB, above that the size itself in steps of 2 MiB. Of a
  large block a rest is split off where it exceeds 1 MiB;
* segments that grow (``expandable_segments``): one range of addresses a pool and stream, into which pages of 2 MiB
  (small) or 20 MiB are mapped behind what is there. Any rest of 512 bytes is split off. A free block at the end counts
  as large as it can grow, so that it is taken last.

What is held falls only when the cache is emptied. Every size is in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

MIB = 1 << 20

ROUNDING = 512
SMALL = MIB
"""Largest size of the small pool."""
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
"""Segments for small sizes and for those below ``LARGE``; pages of segments that grow."""
LARGE = 10 * MIB
LARGE_STEP = 2 * MIB
"""Segments for sizes from ``LARGE`` on are multiples of it."""
RANGE = LARGE_SEGMENT << 25
"""Addresses of a segment that grows, whole pages, and the distance between segments: more than any device's memory."""


def rounded(size: int) -> int:
    """A size as the allocator counts it."""
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


def segment_bytes(size: int) -> int:
    """The segment of fixed size that is asked of the driver for a rounded size."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else -(-size // LARGE_STEP) * LARGE_STEP


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment, between the pieces before and after it."""

    pool: Pool
    address: int
    size: int
    free: bool = True
    mapped: bool = True
    before: Block | None = None
    after: Block | None = None


@dataclass(eq=False, slots=True)
class Pool:
    """Free blocks of one size class on one stream."""

    small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    """(size, address), sorted."""
    at: dict[int, Block] = field(default_factory=dict)
    """Free and unmapped blocks by address."""
    unmapped: list[int] = field(default_factory=list)
    """Addresses of blocks without pages, sorted."""

    @property
    def page(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def put(self, block: Block) -> None:
        self.at[block.address] = block
        if block.mapped:
            insort(self.free, (block.size, block.address))
        else:
            insort(self.unmapped, block.address)

    def drop(self, block: Block) -> None:
        del self.at[block.address]
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address)]


@dataclass
class CachingAllocator:
    """One device's allocator.

    Attributes:
        grows: whether segments grow.
        allocated: bytes of taken blocks, rounded; ``peak`` the most so far.
        reserved: bytes held of the device; ``peak_reserved`` the most so far.
    """

    grows: bool = True
    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    peak_reserved: int = 0
    _pools: dict[tuple[bool, int], Pool] = field(default_factory=dict)
    _next: int = RANGE

    def take(self, size: int, stream: int = 0) -> Block:
        """A block of at least ``size`` bytes."""
        size = rounded(size)
        key = (size <= SMALL, stream)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(key[0])
        block = self._fitting(pool, size) or (self._grown(pool, size) if self.grows else self._new(pool, size))
        rest = block.size - size
        if rest >= ROUNDING if pool.small or self.grows else rest > SMALL:
            _cut(block, size)
        block.free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a taken block back to its pool."""
        self.allocated -= block.size
        block.free = True
        _joined(block)

    def empty_cache(self) -> None:
        """Give the device back what no taken block stands on: whole segments, or whole pages."""
        for pool in self._pools.values():
            for _, address in list(pool.free):
                block = pool.at[address]
                if self.grows:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.drop(block)
                    self.reserved -= block.size

    def reset_peaks(self) -> None:
        """Count the peaks anew."""
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def _fitting(self, pool: Pool, size: int) -> Block | None:
        """The free block that is taken for a size, out of its pool."""
        place = bisect_left(pool.free, (size, 0))
        if place == len(pool.free):
            return None
        block = pool.at[pool.free[place][1]]
        if self.grows:
            for _, address in pool.free[place + 1 :]:
                other = pool.at[address]
                if _can_be(other) >= _can_be(block):
                    break
                block = other
        pool.drop(block)
        return block

    def _new(self, pool: Pool, size: int) -> Block:
        """A whole new segment of fixed size."""
        block = Block(pool, self._next, segment_bytes(size))
        self._next += RANGE
        self._hold(block.size)
        return block

    def _grown(self, pool: Pool, size: int) -> Block:
        """The lowest free range behind which enough addresses are free, with pages under all of it."""
        block = next((found for found in _at_edges(pool) if _reach(found) >= size), None)
        if block is None:
            block = Block(pool, self._next, RANGE, mapped=False)
            self._next += 2 * RANGE
            pool.put(block)
        if not block.mapped:
            block = self._map(block, size)
        while block.size < size:
            assert block.after is not None
            block = self._map(block.after, size - block.size)
        pool.drop(block)
        return block

    def _map(self, block: Block, size: int) -> Block:
        """Pages under the first ``size`` bytes of an unmapped block; what it became, joined with its neighbours."""
        pool = block.pool
        mapped = min(-(-size // pool.page) * pool.page, block.size)
        pool.drop(block)
        if mapped < block.size:
            _cut(block, mapped)
        block.mapped = True
        self._hold(mapped)
        return _joined(block)

    def _unmap(self, block: Block) -> None:
        """Take the whole pages away that lie in a free block."""
        pool, end = block.pool, block.address + block.size
        first = -(-block.address // pool.page) * pool.page
        last = end // pool.page * pool.page
        if first >= last:
            return
        pool.drop(block)
        if first > block.address:
            low = Block(pool, block.address, first - block.address, before=block.before, after=block)
            if block.before is not None:
                block.before.after = low
            block.before, block.address, block.size = low, first, end - first
            pool.put(low)
        if last < end:
            _cut(block, last - first)
        block.mapped = False
        self.reserved -= block.size
        _joined(block)

    def _hold(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)


def _cut(block: Block, size: int) -> None:
    """Split the part above ``size`` bytes off, free and in the pool."""
    rest = Block(block.pool, block.address + size, block.size - size, True, block.mapped, block, block.after)
    if rest.after is not None:
        rest.after.before = rest
    block.after, block.size = rest, size
    block.pool.put(rest)


def _joined(block: Block) -> Block:
    """A free block put into its pool, one with the neighbours of its kind."""
    pool = block.pool
    before, after = block.before, block.after
    if before is not None and before.free and before.mapped == block.mapped:
        pool.drop(before)
        block.address, block.size = before.address, before.size + block.size
        block.before = before.before
        if block.before is not None:
            block.before.after = block
    if after is not None and after.free and after.mapped == block.mapped:
        pool.drop(after)
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block
    pool.put(block)
    return block


def _can_be(block: Block) -> int:
    """The size that a free block has with the unmapped one behind it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _at_edges(pool: Pool) -> Iterator[Block]:
    """Unmapped blocks by address, each from the free block right before it on."""
    for address in pool.unmapped:
        block = pool.at[address]
        before = block.before
        yield before if before is not None and before.free else block


def _reach(block: Block | None) -> int:
    """Bytes from a block's start to the next taken one."""
    bytes_ = 0
    while block is not None and block.free:
        bytes_ += block.size
        block = block.after
    return bytes_
