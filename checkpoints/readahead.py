"""Reading ahead of who takes: threads fill buffers from files while what was read before is used.

Wants are taken in the order of the files, as many to a buffer as it holds. Buffers are made once and used again, so
the memory of a whole load is that of its buffers (``staging_bytes``); a want that is larger than one gets memory of its
own, one at a time. Threads only read: they end with the ``with`` block, whatever ended it, and what one of them met is
raised where its buffer is taken.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import prod
from types import TracebackType

import torch
from torch import Tensor

from shardwright.checkpoints.reader import Part, ShardReader

BUFFER_BYTES = 32 << 20
MOST_READERS = 8
"""Threads of one process at most: more do not raise the rate of a disk or of a page cache."""
SPARE = 2
"""Buffers beside one for each thread: one is being used, one waits for its copy to end."""
ALIGNMENT = 64
"""Bytes at whose multiples tensors begin in a buffer."""

Want = tuple[Part, ...]
"""Parts that are used together."""


def readers_for(cores: int | None, processes: int) -> int:
    """Threads of each of ``processes`` on a machine of ``cores``: its share of them, 1 to ``MOST_READERS``."""
    return max(1, min(MOST_READERS, (cores or 1) // max(1, processes)))


@dataclass(frozen=True)
class Batch:
    """Wants that lie in one buffer.

    Attributes:
        wants: number of each want, and how many parts it has.
        parts: theirs, one want after another.
        shapes, dtypes, starts: of each part; its first byte in the buffer, which follows the files' order.
        size: bytes of all, with the gaps between them.
    """

    wants: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    starts: tuple[int, ...]
    size: int

    def tensors(self, data: Tensor) -> list[Tensor]:
        """The parts as tensors that share ``data``, uint8 [size], wherever it is."""
        return [
            data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, shape, dtype in zip(self.starts, self.shapes, self.dtypes, strict=True)
        ]

    def by_want(self, data: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Each want's number and its parts' tensors."""
        tensors = iter(self.tensors(data))
        for number, count in self.wants:
            yield number, list(islice(tensors, count))


@dataclass(frozen=True)
class Filled:
    """A batch that was read.

    Attributes:
        data: uint8 [batch.size], on the host; good until it is given back.
    """

    batch: Batch
    data: Tensor
    buffer: Tensor | None


class ReadAhead:
    """Batches of wants, read by threads, in the files' order.

    Use it in a ``with`` block; iterate once; give each batch back when its bytes are no longer needed.

    Args:
        reader: open files.
        wants: what to read; each is in one batch.
        readers: threads.
        pinned: make buffers that a device copies from while the host goes on.

    Raises:
        CheckpointError: while iterating, as :meth:`ShardReader.read_into`.
    """

    def __init__(self, reader: ShardReader, wants: Sequence[Want], *, readers: int, pinned: bool = False) -> None:
        self.reader, self.readers = reader, readers
        self._batches = batches_of(reader, wants)
        held = sum(batch.size <= BUFFER_BYTES for batch in self._batches)
        size = max((batch.size for batch in self._batches if batch.size <= BUFFER_BYTES), default=0)
        count = min(readers + SPARE, held)
        self._free = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        self.staging_bytes = size * count + max(
            (one.size for one in self._batches if one.size > BUFFER_BYTES), default=0
        )
        self._held: deque[tuple[Tensor | None, Callable[[], None]]] = deque()
        self._waiting: deque[tuple[Filled, Future[None]]] = deque()
        self._pool = ThreadPoolExecutor(readers, "shard-reader")
        self._next = 0

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, future in self._waiting:
            future.cancel()
        self._pool.shutdown(wait=True)
        while self._held and error is None:
            self._held.popleft()[1]()

    def __iter__(self) -> Iterator[Filled]:
        while self._waiting or self._next < len(self._batches):
            self._hand_out()
            filled, future = self._waiting.popleft()
            future.result()
            yield filled

    def give_back(self, filled: Filled, wait: Callable[[], None]) -> None:
        """Let a batch's buffer be filled again once ``wait`` has returned: when a copy from it has ended, say.

        Called before the next batch is asked for. What ``wait`` raises is raised here, by the next batch, or at the end
        of the ``with`` block.
        """
        self._held.append((filled.buffer, wait))
        while len(self._held) >= SPARE:
            self._reclaim()

    def _reclaim(self) -> None:
        buffer, wait = self._held.popleft()
        wait()
        if buffer is not None:
            self._free.append(buffer)

    def _hand_out(self) -> None:
        """Give the threads all that there are buffers for."""
        while self._next < len(self._batches):
            batch = self._batches[self._next]
            if batch.size > BUFFER_BYTES:
                if self._waiting:
                    return
                while self._held:
                    self._reclaim()
                buffer, data = None, torch.empty(batch.size, dtype=torch.uint8)
            else:
                if not self._free and self._held and not self._waiting:
                    self._reclaim()
                if not self._free:
                    return
                buffer = self._free.pop()
                data = buffer[: batch.size]
            filled = Filled(batch, data, buffer)
            self._waiting.append((filled, self._pool.submit(self._read, filled)))
            self._next += 1

    def _read(self, filled: Filled) -> None:
        batch = filled.batch
        pairs = list(zip(batch.parts, batch.tensors(filled.data), strict=True))
        self.reader.read_into([pairs[place] for place in sorted(range(len(pairs)), key=batch.starts.__getitem__)])


def batches_of(reader: ShardReader, wants: Sequence[Want]) -> list[Batch]:
    """Wants in the order of the files, as many to a batch as a buffer holds.

    Raises:
        CheckpointError: ``unknown-tensor``, ``unsupported-dtype``.
    """
    order = sorted(range(len(wants)), key=lambda number: min(map(reader.place, wants[number]), default=("", 0)))
    found: list[Batch] = []
    some: list[int] = []
    room = BUFFER_BYTES
    for number in order:
        need = sum(_padded(reader.part_bytes(part)) for part in wants[number])
        if some and need > room:
            found.append(_batch(reader, wants, some))
            some, room = [], BUFFER_BYTES
        some.append(number)
        room -= need
    return [*found, _batch(reader, wants, some)] if some else found


def _batch(reader: ShardReader, wants: Sequence[Want], numbers: list[int]) -> Batch:
    """One batch; its buffer is laid out in the files' order, so that neighbours are read together."""
    parts = [part for number in numbers for part in wants[number]]
    starts, at = [0] * len(parts), 0
    for place in sorted(range(len(parts)), key=lambda place: reader.place(parts[place])):
        starts[place] = at
        at += _padded(reader.part_bytes(parts[place]))
    shapes = tuple(tuple(stop - start for start, stop in part.box) for part in parts)
    dtypes = tuple(reader.dtype(part.tensor) for part in parts)
    counted = tuple((number, len(wants[number])) for number in numbers)
    return Batch(counted, tuple(parts), shapes, dtypes, tuple(starts), at)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def cores() -> int | None:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
