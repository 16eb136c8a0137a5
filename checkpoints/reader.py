"""Reading tensors, whole or in part, straight from the files: only the bytes asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from shardwright.checkpoints.conversion import Box, Piece, intersect
from shardwright.checkpoints.headers import Headers, TensorHeader
from shardwright.checkpoints.marker import require_weights
from shardwright.checkpoints.names import TensorRead
from shardwright.checkpoints.packing.dtypes import BITS, TORCH
from shardwright.checkpoints.shard_files import MOST_BUFFERS, Run, ShardFiles
from shardwright.schemas.errors import CheckpointError

BAND_BYTES = 8 << 20
"""Most bytes read at once where rows are cut inside: the rows are read whole and cut in memory."""
ROW_BYTES = 256 << 10
"""Rows up to this size are read whole; larger ones are entered and cut at the next dim."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a file tensor inside ``box``, which names every dim."""

    tensor: str
    box: Box


def whole_box(shape: tuple[int, ...], box: Box | None, *, where: str) -> Box:
    """``box`` with its missing trailing dims taken whole.

    Raises:
        CheckpointError: ``bad-box`` when it does not lie inside ``shape``.
    """
    full = tuple((0, dim) for dim in shape)
    wanted = full if box is None else (*box, *full[len(box) :])
    if len(wanted) != len(full) or any(not 0 <= a <= b <= dim for (a, b), dim in zip(wanted, shape, strict=True)):
        raise CheckpointError(
            "bad-box", f"{wanted} is not inside {list(shape)}", where=where, next_action="correct the slice"
        )
    return wanted


class ShardReader:
    """Tensors of a checkpoint's safetensors files. Threads may share one.

    Raises:
        CheckpointError: ``headers-only`` when the folder holds no weights.
    """

    def __init__(self, folder: Path, headers: Headers) -> None:
        self.folder = Path(folder)
        require_weights(self.folder)
        self.headers = headers
        self._files = ShardFiles(self.folder)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data taken from files so far."""
        return self._files.bytes_read

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or the part of it inside ``box``, as a new contiguous CPU tensor in its stored dtype.

        Args:
            name: a tensor of the files.
            box: ``(start, stop)`` for each dim; trailing dims may be left out and are then taken whole.

        Raises:
            CheckpointError: ``unknown-tensor``, ``bad-box``, ``unsupported-dtype``, and as :meth:`read_into`.
        """
        part = self.part(name, box)
        out = torch.empty([stop - start for start, stop in part.box], dtype=self.dtype(name))
        self.read_into([(part, out)])
        return out

    def part(self, name: str, box: Box | None = None) -> Part:
        """A tensor, or the part of it inside ``box``, to be read later.

        Raises:
            CheckpointError: ``unknown-tensor``, ``bad-box``, ``unsupported-dtype``.
        """
        header = self._header(name)
        self.dtype(name)
        return Part(name, whole_box(header.shape, box, where=f"{header.file}: {name}"))

    def dtype(self, name: str) -> torch.dtype:
        """How a file tensor's elements are stored.

        Raises:
            CheckpointError: ``unknown-tensor``, ``unsupported-dtype``.
        """
        header = self._header(name)
        if header.dtype not in TORCH:
            raise CheckpointError(
                "unsupported-dtype",
                f"{header.dtype} has no whole-byte elements",
                where=f"{header.file}: {name}",
                next_action="decode it with the codec of its packing",
            )
        found: torch.dtype = getattr(torch, TORCH[header.dtype])
        return found

    def part_bytes(self, part: Part) -> int:
        """Size of a part's elements."""
        header = self._header(part.tensor)
        return prod(stop - start for start, stop in part.box) * BITS[header.dtype] // 8

    def place(self, part: Part) -> tuple[str, int]:
        """The file in which a part begins, and the byte."""
        header = self._header(part.tensor)
        at = 0
        for (start, _), dim in zip(part.box, header.shape, strict=True):
            at = at * dim + start
        return header.file, header.start + at * BITS[header.dtype] // 8

    def read_into(self, wanted: Sequence[tuple[Part, torch.Tensor]]) -> None:
        """Fill tensors with parts of files; neighbours in a file, given in its order, are read together.

        Args:
            wanted: parts, each with a contiguous CPU tensor of the box's shape in the stored dtype.

        Raises:
            CheckpointError: ``truncated-shard``, ``missing-shard``, ``unreadable-shard``, naming file and tensor.
        """
        run = Run("", 0)
        for part, out in wanted:
            if not out.numel():
                continue
            header = self._header(part.tensor)
            if not _is_run(header.shape, part.box):
                self._rows(out, header.shape, part.box, header.start, BITS[header.dtype] // 8, part.tensor)
                continue
            file, at = self.place(part)
            if file != run.file or at != run.end or len(run.buffers) == MOST_BUFFERS:
                self._files.fill(run)
                run = Run(file, at)
            run.add(out, part.tensor)
        self._files.fill(run)

    def _header(self, name: str) -> TensorHeader:
        header = self.headers.tensors.get(name)
        if header is None:
            raise CheckpointError(
                "unknown-tensor",
                f"the checkpoint has no tensor {name}",
                where=str(self.folder),
                next_action="ask the name map which file tensors fill a parameter",
            )
        return header

    def _rows(self, out: torch.Tensor, shape: tuple[int, ...], box: Box, at: int, itemsize: int, name: str) -> None:
        """Fill ``out`` (of the box's shape) from a row-major tensor of ``shape`` that begins at byte ``at``."""
        inner = shape[1:]
        row = prod(inner) * itemsize
        first, last = box[0] if shape else (0, 1)
        if all(extent == (0, dim) for extent, dim in zip(box[1:], inner, strict=True)):
            self._files.fill(Run.of(self._header(name).file, at + first * row, out, name))
            return
        if row > ROW_BYTES:
            for index in range(first, last):
                self._rows(out[index - first], inner, box[1:], at + index * row, itemsize, name)
            return
        cut = tuple(slice(a, b) for a, b in box[1:])
        step = max(1, BAND_BYTES // row)
        for index in range(first, last, step):
            band = torch.empty((min(step, last - index), *inner), dtype=out.dtype)
            self._files.fill(Run.of(self._header(name).file, at + index * row, band, name))
            out[index - first : index - first + len(band)] = band[(slice(None), *cut)]

    def close(self) -> None:
        """Close all files; the reader may be used again afterwards."""
        self._files.close()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_run(shape: tuple[int, ...], box: Box) -> bool:
    """Whether the elements of a box follow each other in a row-major tensor."""
    cut = [place for place, (extent, dim) in enumerate(zip(box, shape, strict=True)) if extent != (0, dim)]
    return not cut or all(stop - start == 1 for start, stop in box[: cut[-1]])


def read_parameter(
    reader: ShardReader, reads: tuple[TensorRead, ...], shape: tuple[int, ...], box: Box | None = None
) -> torch.Tensor:
    """A parameter, or the part of it inside ``box``, put together from its file tensors.

    Args:
        reader: open files.
        reads: ``NameMap.reads(parameter)``.
        shape: the parameter's whole shape.
        box: part wanted; only that part's bytes are read (an expert rank reads its experts alone).

    Returns:
        A new contiguous CPU tensor in the stored dtype.

    Raises:
        CheckpointError: as :meth:`ShardReader.read`; ``mixed-dtypes`` when the file tensors disagree.
    """
    wanted = whole_box(shape, box, where=reads[0].tensor if reads else "no tensor")
    dtypes = {reader.headers.tensors[read.tensor].dtype for read in reads}
    if len(dtypes) != 1:
        raise CheckpointError(
            "mixed-dtypes",
            f"{len(reads)} file tensors of dtypes {sorted(dtypes)} fill one parameter",
            where=reads[0].tensor if reads else "no tensor",
            next_action="convert the checkpoint to one dtype",
        )
    out = torch.empty([stop - start for start, stop in wanted], dtype=getattr(torch, TORCH[dtypes.pop()]))
    for read in reads:
        piece = intersect(Piece(read.tensor, read.source, read.target, read.axes), wanted)
        if piece is None:
            continue
        order = [axis for axis in piece.axes if axis is not None]
        value = reader.read(piece.tensor, piece.source).permute(order)
        place = tuple(slice(start, stop) for start, stop in piece.target)
        out[place] = value.reshape([stop - start for start, stop in piece.target])
    return out
