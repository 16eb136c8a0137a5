"""Packed expert stacks from files to the device, some experts at a time.

The files' bytes of a few experts, ``FILL_BYTES`` of them, are read together, go to the device as they are, and take the
order of the packed operator there: a host with one thread for each rank would need minutes for it.
Legend: L local experts, n rows of a rank, K in features, o out and i in features of a whole matrix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwright.checkpoints.conversion import Box, Piece, intersect
from shardwright.checkpoints.layouts import ExpertLayout
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.packing.logical import LogicalTensor
from shardwright.checkpoints.reader import Part, ShardReader
from shardwright.kernels.packed_experts.storage import PackedStack, fp8_stack, mxfp4_stack
from shardwright.runtime.experts.int4 import Int4Stack, int4_fills
from shardwright.runtime.experts.packed import BLOCK, Stack
from shardwright.runtime.experts.placement import Slots, runs_of
from shardwright.runtime.load.decode import GROUP, fp8_codes, fp8_parts, mxfp4_codes, mxfp4_parts
from shardwright.runtime.load.fills import FILL_BYTES, Fill, unlike_stack


@dataclass(frozen=True)
class Place:
    """Where a file tensor's part stands in a fill: its experts and its rows."""

    logical: LogicalTensor
    experts: slice
    rows: tuple[int, int]


@dataclass(frozen=True)
class PackedFill:
    """All rows of some experts of a stack.

    Attributes:
        held: values and scales of these experts as this rank keeps them.
        places: of two parts each, values and scales.
    """

    held: PackedStack
    places: tuple[Place, ...]
    parts: tuple[Part, ...]
    into: None = None

    def place(self, read: Sequence[Tensor]) -> Tensor:
        L, n, K = self.held.shape
        mxfp4, device = self.held.kind == "mxfp4", self.held.values.device
        values = torch.empty((L, n, K // 2 if mxfp4 else K), dtype=torch.uint8, device=device)
        shape, dtype = ((L, n, K // GROUP), torch.uint8) if mxfp4 else ((L, n // BLOCK, K // BLOCK), torch.float32)
        scales = torch.empty(shape, dtype=dtype, device=device)
        for place, pair in zip(self.places, zip(read[::2], read[1::2], strict=True), strict=True):
            codes = mxfp4_codes(place.logical, pair) if mxfp4 else fp8_codes(pair)
            extent, (low, high) = place.experts.stop - place.experts.start, place.rows
            value, scale = (one.reshape(extent, *one.shape[-2:]) for one in codes)
            values[place.experts, low:high] = value.view(torch.uint8)
            scales[place.experts, slice(low, high) if mxfp4 else slice(low // BLOCK, high // BLOCK)] = scale
        finite = (scales != 255).all() if mxfp4 else torch.isfinite(scales).all()
        ordered = mxfp4_stack(values, scales) if mxfp4 else fp8_stack(values.view(torch.float8_e4m3fn), scales)
        self.held.values.copy_(ordered.values)
        self.held.scales.copy_(ordered.scales)
        return finite


def stack_fills(
    held: Stack,
    experts: Slots,
    rows: tuple[int, int],
    name: str,
    reader: ShardReader,
    names: NameMap,
    layout: ExpertLayout,
) -> Iterator[Fill]:
    """Fills of this rank's part of a packed stack, bit for bit; only its bytes are read.

    Args:
        held: values and scales as this rank keeps them, [L, n, K].
        experts: number of each of the L experts.
        rows: first and last of the n rows in the whole matrix [o, i].
        name: full name of the stack.

    Raises:
        CheckpointError: ``packed-layout`` where a file tensor does not hold whole blocks in rows of out × in.
    """
    in_out = layout.order == "in_out"
    pieces = pieces_of(names, name, experts, rows, held.shape[2], in_out)
    if isinstance(held, Int4Stack):
        yield from int4_fills(held, pieces, name, reader, names, in_out)
        return
    step = experts_at_once(held)
    some: dict[int, list[Piece]] = {}
    for piece in pieces:
        first, stop = piece.target[0]
        for number in range(first // step, (stop - 1) // step + 1):
            inside = intersect(piece, ((number * step, (number + 1) * step), *piece.target[1:]))
            assert inside is not None
            some.setdefault(number, []).append(replace(inside, target=(inside.target[0], *piece.target[1:])))
    for number, inside_all in sorted(some.items()):
        these = slice(number * step, min((number + 1) * step, held.shape[0]))
        yield _fill(
            PackedStack(held.values[these], held.scales[these], held.kind), inside_all, name, reader, names, in_out
        )


def experts_at_once(held: PackedStack) -> int:
    """Experts whose bytes together are within ``FILL_BYTES``; one at least."""
    _, n, K = held.shape
    return max(1, FILL_BYTES // max(1, n * K // (2 if held.kind == "mxfp4" else 1)))


def pieces_of(
    names: NameMap, name: str, experts: Slots, rows: tuple[int, int], width: int, in_out: bool
) -> Iterator[Piece]:
    """File tensors' parts of a rank's experts; targets are (place, row, column) as the stack orders its matrices."""
    matrix = ((0, width), rows) if in_out else (rows, (0, width))
    pieces = names.pieces(name)
    starts = [piece.target[0][0] for piece in pieces]
    widest = max((stop - start for start, stop in (piece.target[0] for piece in pieces)), default=0)
    for place, first, stop in runs_of(experts):
        box: Box = ((first, stop), *matrix)
        for whole in pieces[bisect_left(starts, first - widest + 1) : bisect_left(starts, stop)]:
            piece = intersect(whole, box)
            if piece is not None:
                low, high = piece.target[0]
                yield replace(piece, target=((place + low, place + high), *piece.target[1:]))


def _fill(
    held: PackedStack, pieces: list[Piece], name: str, reader: ShardReader, names: NameMap, in_out: bool
) -> PackedFill:
    mxfp4 = held.kind == "mxfp4"
    row, column = (2, 1) if in_out else (1, 2)
    places: list[Place] = []
    parts: list[Part] = []
    for piece in pieces:
        logical = names.logical(piece.tensor)
        last = len(logical.shape) - 1
        step = GROUP if mxfp4 else BLOCK
        edges = [*piece.source[last], *(() if mxfp4 else (*piece.source[last - 1], *piece.target[row]))]
        odd = [edge for edge in edges if edge % step]
        whole = piece.target[column] == (0, held.shape[2])
        if piece.axes[row] != last - 1 or piece.axes[column] != last or odd or not whole:
            raise unlike_stack(name, piece, "blocks in rows")
        if not mxfp4 and logical.block[-2:] != (BLOCK, BLOCK):
            raise unlike_stack(name, piece, "blocks in rows")
        places.append(Place(logical, slice(*piece.target[0]), piece.target[row]))
        parts += (mxfp4_parts if mxfp4 else fp8_parts)(reader, logical, piece.source)
    return PackedFill(held, tuple(places), tuple(parts))
