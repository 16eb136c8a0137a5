"""Reading tensors, whole or in part, straight from the files: only the bytes asked for."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import torch

from shardwright.checkpoints.conversion import Box, Piece, intersect
from shardwright.checkpoints.headers import Headers
from shardwright.checkpoints.marker import require_weights
from shardwright.checkpoints.names import TensorRead
from shardwright.checkpoints.packing.dtypes import BITS, TORCH
from shardwright.schemas.errors import CheckpointError

BAND_BYTES = 8 << 20
"""Most bytes read at once where rows are cut inside: the rows are read whole and cut in memory."""
ROW_BYTES = 256 << 10
"""Rows up to this size are read whole; larger ones are entered and cut at the next dim."""


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
    """Positioned reads from safetensors files (no memory map, so a file that shrinks is an error, not a crash).

    Attributes:
        bytes_read: bytes of tensor data taken from files so far.

    Raises:
        CheckpointError: ``headers-only`` when the folder holds no weights.
    """

    def __init__(self, folder: Path, headers: Headers) -> None:
        self.folder = Path(folder)
        require_weights(self.folder)
        self.headers = headers
        self.bytes_read = 0
        self._handles: dict[str, int] = {}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or the part of it inside ``box``, as a new contiguous CPU tensor in its stored dtype.

        Args:
            name: a tensor of the files.
            box: ``(start, stop)`` for each dim; trailing dims may be left out and are then taken whole.

        Raises:
            CheckpointError: ``unknown-tensor``, ``bad-box``, ``unsupported-dtype``, ``truncated-shard``,
                ``missing-shard``.
        """
        header = self.headers.tensors.get(name)
        if header is None:
            raise CheckpointError(
                "unknown-tensor",
                f"the checkpoint has no tensor {name}",
                where=str(self.folder),
                next_action="ask the name map which file tensors fill a parameter",
            )
        if header.dtype not in TORCH:
            raise CheckpointError(
                "unsupported-dtype",
                f"{header.dtype} has no whole-byte elements",
                where=f"{header.file}: {name}",
                next_action="decode it with the codec of its packing",
            )
        full = tuple((0, dim) for dim in header.shape)
        wanted = full if box is None else (*box, *full[len(box) :])
        if len(wanted) != len(full) or any(
            not 0 <= a <= b <= dim for (a, b), (_, dim) in zip(wanted, full, strict=True)
        ):
            raise CheckpointError(
                "bad-box",
                f"{wanted} is not inside {list(header.shape)}",
                where=f"{header.file}: {name}",
                next_action="correct the slice",
            )
        out = torch.empty([b - a for a, b in wanted], dtype=getattr(torch, TORCH[header.dtype]))
        if out.numel():
            self._fill(out, header.shape, wanted, header.file, header.start, BITS[header.dtype] // 8)
        return out

    def _fill(self, out: torch.Tensor, shape: tuple[int, ...], box: Box, file: str, at: int, itemsize: int) -> None:
        """Fill ``out`` (of the box's shape) from a row-major tensor of ``shape`` that begins at byte ``at``."""
        inner = shape[1:]
        row = prod(inner) * itemsize
        if not shape or all((a, b) == (0, dim) for (a, b), dim in zip(box[1:], inner, strict=True)):
            self._pread(out, file, at + (box[0][0] * row if shape else 0))
            return
        first, last = box[0]
        if row > ROW_BYTES:
            for index in range(first, last):
                self._fill(out[index - first], inner, box[1:], file, at + index * row, itemsize)
            return
        cut = tuple(slice(a, b) for a, b in box[1:])
        step = max(1, BAND_BYTES // row)
        for index in range(first, last, step):
            band = torch.empty((min(step, last - index), *inner), dtype=out.dtype)
            self._pread(band, file, at + index * row)
            out[index - first : index - first + len(band)] = band[(slice(None), *cut)]

    def _pread(self, out: torch.Tensor, file: str, at: int) -> None:
        view = memoryview(out.reshape(-1).view(torch.uint8).numpy().data)
        handle = self._handle(file)
        done = 0
        while done < len(view):
            got = os.preadv(handle, [view[done : done + (1 << 30)]], at + done)
            if got == 0:
                raise CheckpointError(
                    "truncated-shard",
                    f"the file ends at byte {at + done}; its header promised more when it was read",
                    where=str(self.folder / file),
                    next_action="fetch this file again; do not change a checkpoint while it is read",
                )
            done += got
        self.bytes_read += done

    def _handle(self, file: str) -> int:
        if file not in self._handles:
            try:
                self._handles[file] = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(
                    "missing-shard",
                    f"cannot open: {error.strerror}",
                    where=str(self.folder / file),
                    next_action="fetch this file; check its permissions",
                ) from error
        return self._handles[file]

    def close(self) -> None:
        """Close all files; the reader may be used again afterwards."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
