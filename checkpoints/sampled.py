"""What the weights' values are, from a bounded number of bytes: one hash for each weight file.

Headers of two revisions of one model are equal; their values are not. A checkpoint of at most ``MOST_BYTES`` is hashed
whole. Of a larger one ``PIECES`` pieces of ``PIECE_BYTES`` are read: every file has an equal share; in a file every
kind of tensor (its name without numbers) is read, rare ones wholly, common ones evenly; in a tensor every stretch.
Places follow from names and sizes alone, so whoever has equal headers reads the same bytes. Another revision, another
file and a kind of tensor that was replaced are met; a few chosen values of a large checkpoint need not be.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoints.collector import paused_collector
from shardwright.checkpoints.headers import Headers, TensorHeader, read_headers
from shardwright.checkpoints.marker import HEADERS_ONLY
from shardwright.schemas.errors import CheckpointError
from shardwright.schemas.profile import WeightsPin

MOST_BYTES = 32 << 20
"""Bytes that are read of a checkpoint."""
PIECE_BYTES = 4 << 10
PIECES = MOST_BYTES // PIECE_BYTES
LOOKED_AT = 16
"""Places of a file that tell whether it holds values."""
READERS = 8
"""Threads; a network file system answers in a millisecond, and pieces do not follow each other."""
_NO_DIGITS = str.maketrans("", "", "0123456789")


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``[start, end)`` of a file, inside one tensor."""

    tensor: str
    start: int
    end: int


def weights_pin(folder: Path, headers: Headers | None = None, files: Collection[str] | None = None) -> WeightsPin:
    """Hash the sampled values of a folder.

    Args:
        folder: the checkpoint.
        headers: its headers, if they were read already.
        files: weight files to read; all where left out.

    Returns:
        No file at all where the folder holds headers alone.

    Raises:
        CheckpointError: as :func:`read_headers`; ``missing-shard``, ``unreadable-shard``, ``truncated-shard``.
    """
    folder = Path(folder)
    if holds_headers_alone(folder):
        return WeightsPin()
    with paused_collector():
        headers = headers or read_headers(folder)
        wanted = {name: pieces for name, pieces in pieces_of(headers).items() if files is None or name in files}
    with ThreadPoolExecutor(READERS) as pool:
        found = {name: _digest(folder, name, pieces, pool) for name, pieces in sorted(wanted.items())}
    return WeightsPin(files=found, read_bytes=sum(one.end - one.start for each in wanted.values() for one in each))


def holds_headers_alone(folder: Path) -> bool:
    """Whether a folder says that its weights were not fetched, or all its weight files are holes behind their headers.

    Raises:
        CheckpointError: ``missing-shard``, ``unreadable-shard``.
    """
    files = sorted(folder.glob("*.safetensors"))
    return (folder / HEADERS_ONLY).exists() or (bool(files) and all(map(_is_hole, files)))


def _is_hole(path: Path) -> bool:
    """Whether a weight file has nothing but zeros at places that are spread over its tensors."""
    with _Opened(path) as handle:
        size = os.fstat(handle.number).st_size
        if size < 8:
            return True
        start = 8 + int.from_bytes(handle.read(Piece("its header", 0, 8)), "little")
        for number in range(LOOKED_AT):
            at = start + (size - start) * number // LOOKED_AT
            if at < size and handle.read(Piece("its tensors", at, min(at + PIECE_BYTES, size))).strip(b"\x00"):
                return False
    return True


def pieces_of(headers: Headers) -> dict[str, list[Piece]]:
    """File → the pieces that are read of it, in the order of their places."""
    by_file: dict[str, list[TensorHeader]] = {name: [] for name in headers.files}
    for tensor in headers.tensors.values():
        if tensor.stored_bytes:
            by_file[tensor.file].append(tensor)
    if headers.stored_bytes <= MOST_BYTES:
        return {
            name: [Piece(one.name, one.start, one.end) for one in sorted(tensors, key=lambda one: one.start)]
            for name, tensors in by_file.items()
        }
    share = max(1, PIECES // len(by_file))
    return {name: _sampled(tensors, share) for name, tensors in by_file.items()}


def _sampled(tensors: list[TensorHeader], share: int) -> list[Piece]:
    """``share`` pieces of a file's tensors, fewer where tensors are smaller than a piece."""
    chosen = _spread(tensors, share)
    each = share // max(1, len(chosen))
    return sorted((piece for one in chosen for piece in _cut(one, each)), key=lambda piece: piece.start)


def _spread(tensors: list[TensorHeader], share: int) -> list[TensorHeader]:
    """At most ``share`` tensors: all of a rare kind, evenly spaced ones of a common one."""
    if len(tensors) <= share:
        return tensors
    kinds: dict[str, list[TensorHeader]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.name.translate(_NO_DIGITS)].append(tensor)
    chosen: list[TensorHeader] = []
    for place, (_, alike) in enumerate(sorted(kinds.items(), key=lambda item: (len(item[1]), item[0]))):
        count = min(len(alike), (share - len(chosen)) // (len(kinds) - place))
        chosen += [alike[number * len(alike) // count] for number in range(count)]
    return chosen


def _cut(tensor: TensorHeader, count: int) -> Iterator[Piece]:
    """One piece in each of ``count`` equal stretches, at a place that the tensor's name draws."""
    count = max(1, min(count, tensor.stored_bytes // PIECE_BYTES))
    for number in range(count):
        start = tensor.start + tensor.stored_bytes * number // count
        room = tensor.start + tensor.stored_bytes * (number + 1) // count - start
        drawn = hashlib.sha256(f"{tensor.name}\x00{number}".encode()).digest()
        start += int.from_bytes(drawn[:8], "little") % max(1, room - PIECE_BYTES + 1)
        yield Piece(tensor.name, start, min(start + PIECE_BYTES, tensor.end))


def _digest(folder: Path, name: str, pieces: list[Piece], pool: ThreadPoolExecutor) -> str:
    """Hash of a file's pieces with their places."""
    digest = hashlib.sha256()
    with _Opened(folder / name) as handle:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle.number, 0, 0, os.POSIX_FADV_RANDOM)
        for piece, data in zip(pieces, pool.map(handle.read, pieces), strict=True):
            digest.update(f"{piece.tensor}\x00{piece.start}\x00{len(data)}\n".encode("utf-8", "surrogatepass"))
            digest.update(data)
    return digest.hexdigest()


class _Opened:
    """A file that threads read pieces of."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, -1

    def __enter__(self) -> _Opened:
        try:
            self.number = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._error("missing-shard", f"cannot open: {error.strerror}", "") from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.number)

    def read(self, piece: Piece) -> bytes:
        """The bytes of a piece, all of them."""
        try:
            data = os.pread(self.number, piece.end - piece.start, piece.start)
            while 0 < len(data) < piece.end - piece.start:
                more = os.pread(self.number, piece.end - piece.start - len(data), piece.start + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            what = f"cannot read at byte {piece.start}: {error.strerror}"
            raise self._error("unreadable-shard", what, piece.tensor) from error
        if len(data) != piece.end - piece.start:
            raise self._error("truncated-shard", f"the file ends before byte {piece.end}", piece.tensor)
        return data

    def _error(self, code: str, what: str, tensor: str) -> CheckpointError:
        return CheckpointError(
            code,
            what,
            where=f"{self.path}: {tensor}" if tensor else str(self.path),
            next_action="fetch this file again; check its permissions",
        )
