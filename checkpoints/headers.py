"""Safetensors headers, parsed and verified here: names, dtypes, shapes and places of all tensors.

A file is: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes without gaps.
No weight is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shardwright.checkpoints.collector import paused_collector
from shardwright.checkpoints.config import parse_json
from shardwright.checkpoints.index import weight_files
from shardwright.checkpoints.packing.dtypes import BITS
from shardwright.schemas.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_DIMS = 16


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor in one file.

    Attributes:
        start, end: absolute byte offsets in the file, ``end - start == numel * bits / 8``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Headers:
    """All tensors of a checkpoint folder.

    Attributes:
        tensors: name → header, ordered by file and then by place in the file.
        files: file name → size in bytes.
        stored_bytes: bytes of all tensors, headers not counted.
    """

    folder: Path
    tensors: dict[str, TensorHeader]
    files: dict[str, int]
    stored_bytes: int


def read_headers(folder: Path) -> Headers:
    """Read and verify the headers of every weight file of a folder, and its index where it has one.

    Raises:
        CheckpointError: ``missing-folder``, ``missing-weights``, ``unsafe-weights``, ``missing-shard``,
            ``unsafe-path``, ``corrupt-index``, ``corrupt-header``, ``truncated-shard``, ``index-mismatch``,
            ``duplicate-tensor``.
    """
    with paused_collector():
        return _read(Path(folder))


def _read(folder: Path) -> Headers:
    files, index = weight_files(folder)
    tensors: dict[str, TensorHeader] = {}
    sizes: dict[str, int] = {}
    for name in files:
        sizes[name], found = read_file_header(folder, name)
        for header in found:
            if header.name in tensors:
                raise CheckpointError(
                    "duplicate-tensor",
                    f"{header.name} is in {tensors[header.name].file} and in {name}",
                    where=str(folder / name),
                    next_action="remove the stale shard; one folder may hold one revision of a checkpoint",
                )
            tensors[header.name] = header
    if index is not None:
        _verify_index(index, tensors, folder)
    return Headers(folder, tensors, sizes, sum(header.stored_bytes for header in tensors.values()))


def read_file_header(folder: Path, name: str) -> tuple[int, list[TensorHeader]]:
    """Size of one file, and its tensors in the order of their offsets.

    Raises:
        CheckpointError: ``missing-shard``, ``truncated-shard``, ``corrupt-header``.
    """
    path = folder / name
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little") if len(prefix) == 8 else -1
            data = stream.read(length) if 2 <= length <= min(MAX_HEADER_BYTES, size - 8) else b""
    except OSError as error:
        raise CheckpointError(
            "missing-shard",
            f"cannot read: {error.strerror}",
            where=str(path),
            next_action="fetch this file; check its permissions",
        ) from error
    if length < 0:
        raise CheckpointError(
            "truncated-shard",
            f"{size} bytes; a safetensors file has at least 8",
            where=str(path),
            next_action="fetch this file again",
        )
    if not data:
        truncated = 2 <= length <= MAX_HEADER_BYTES
        raise CheckpointError(
            "truncated-shard" if truncated else "corrupt-header",
            f"the file is {size} bytes and claims a header of {length} bytes",
            where=str(path),
            next_action="fetch this file again" if truncated else "this is not a safetensors file; fetch it again",
        )
    table = parse_json(data, code="corrupt-header", where=str(path))
    return size, _entries(table, name, path, size, 8 + length)


def _corrupt(what: str, path: Path) -> CheckpointError:
    return CheckpointError("corrupt-header", what[:400], where=str(path), next_action="fetch this file again")


def _entries(table: Any, name: str, path: Path, size: int, base: int) -> list[TensorHeader]:
    """Check each entry, then that the tensors tile the data section: no overlap, no gap, no missing bytes."""
    if not isinstance(table, dict):
        raise _corrupt(f"expected an object, found {type(table).__name__}", path)
    found = []
    for key, entry in table.items():
        if key == "__metadata__":
            if not isinstance(entry, dict) or any(not isinstance(value, str) for value in entry.values()):
                raise _corrupt("__metadata__ should map text to text", path)
            continue
        found.append(_entry(key, entry, name, path, base))
    found.sort(key=lambda header: (header.start, header.end))
    place = base
    for header in found:
        if header.start != place:
            kind = "overlaps its predecessor" if header.start < place else f"leaves {header.start - place} bytes unused"
            raise _corrupt(f"{header.name} {kind}: it starts at {header.start}, expected {place}", path)
        place = header.end
    if place > size:
        raise CheckpointError(
            "truncated-shard",
            f"the file is {size} bytes; its header describes {place}",
            where=str(path),
            next_action="fetch this file again",
        )
    if place < size:
        raise _corrupt(f"{size - place} bytes after the last tensor belong to none", path)
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _entry(key: str, entry: Any, name: str, path: Path, base: int) -> TensorHeader:
    if not 0 < len(key) <= 1000 or not key.isprintable():
        raise _corrupt("a tensor's name is empty, unprintable or longer than 1000 characters", path)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _corrupt(f"{key}: expected exactly dtype, shape and data_offsets", path)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _corrupt(f"{key}: unknown dtype {dtype!r}", path)
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_count(dim) for dim in shape):
        raise _corrupt(f"{key}: shape {shape!r} is not a list of at most {MAX_DIMS} sizes", path)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(value) for value in offsets):
        raise _corrupt(f"{key}: data_offsets {offsets!r} is not a pair of offsets", path)
    bits = prod(shape) * BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise _corrupt(f"{key}: {dtype} {shape} needs {bits} bits; the offsets span {offsets[1] - offsets[0]} B", path)
    return TensorHeader(key, dtype, tuple(shape), name, base + offsets[0], base + offsets[1])


def _verify_index(index: dict[str, str], tensors: dict[str, TensorHeader], folder: Path) -> None:
    where = str(folder / "model.safetensors.index.json")
    for tensor, file in index.items():
        actual = tensors.get(tensor)
        if actual is None or actual.file != file:
            place = "in no file" if actual is None else f"in {actual.file}"
            raise CheckpointError(
                "index-mismatch",
                f"the index puts {tensor[:200]} in {file}; it is {place}",
                where=where,
                next_action="fetch the index and its shards from one revision",
            )
    for tensor in tensors:
        if tensor not in index:
            raise CheckpointError(
                "index-mismatch",
                f"{tensor[:200]} is in {tensors[tensor].file} but not in the index",
                where=where,
                next_action="fetch the index and its shards from one revision",
            )
