"""What fills a parameter: parts of file tensors that are read together, and where their values go.

A fill knows its parts before anything is read, so that others can read them ahead; it is small, so that the memory of a
load does not follow the size of a parameter. ``place`` runs where the parameter is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from shardwright.checkpoints.conversion import Box, Piece, intersect
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.packing.dtypes import TORCH
from shardwright.checkpoints.reader import Part, ShardReader
from shardwright.schemas.errors import CheckpointError

FILL_BYTES = 16 << 20
"""Stored bytes of a fill at most, where they can be cut."""


class Fill(Protocol):
    """Parts of files, and what is done with them."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is read for it."""

    @property
    def into(self) -> Tensor | None:
        """The values that it fills; ``None`` where they are codes."""

    def place(self, read: Sequence[Tensor]) -> Tensor:
        """Put the parts, which were brought to the device, where they belong.

        Returns:
            A flag on the device, 0-dim bool: whether all numbers are finite.
        """


@dataclass(frozen=True)
class PlainFill:
    """Values as the files have them.

    Attributes:
        order: dims of the file tensor in the order of the parameter's.
        into: the part of the parameter that they fill.
    """

    part: Part
    order: tuple[int, ...]
    into: Tensor

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.part,)

    def place(self, read: Sequence[Tensor]) -> Tensor:
        self.into.copy_(read[0].permute(self.order).reshape(self.into.shape))
        return all_finite(self.into)


def plain_fills(reader: ShardReader, names: NameMap, parameter: str, box: Box, into: Tensor) -> Iterator[PlainFill]:
    """Fills of a parameter's box, ``into`` a tensor of the box's shape.

    Raises:
        CheckpointError: as ``NameMap.reads``; ``mixed-dtypes`` when the file tensors disagree.
    """
    reads = names.reads(parameter)
    require_one_dtype([reader.headers.tensors[read.tensor].dtype for read in reads], reads[0].tensor)
    for read in reads:
        piece = intersect(Piece(read.tensor, read.source, read.target, read.axes), box)
        if piece is None:
            continue
        itemsize = reader.dtype(piece.tensor).itemsize
        for part in cut_source(piece, FILL_BYTES // itemsize, (1,) * len(piece.source)):
            place = tuple(slice(*extent) for extent in part.target)
            yield PlainFill(reader.part(part.tensor, part.source), order_of(part), into[place])


def cut_source(piece: Piece, most: int, steps: tuple[int, ...]) -> Iterator[Piece]:
    """Pieces of at most ``most`` values that make up ``piece``, cut along its file tensor's outer dims.

    Args:
        steps: for each dim of the file tensor, at whose multiples it may be cut.
    """
    sizes = [stop - start for start, stop in piece.source]
    dim = next((dim for dim, size in enumerate(sizes) if size > steps[dim]), None)
    if prod(sizes) <= most or dim is None:
        yield piece
        return
    start, stop = piece.source[dim]
    others = prod(sizes) // sizes[dim]
    step = max(1, most // others // steps[dim]) * steps[dim]
    edges = [start, *range((start // steps[dim]) * steps[dim] + step, stop, step), stop]
    for low, high in pairwise(edges):
        yield from cut_source(narrowed(piece, dim, low, high), most, steps)


def narrowed(piece: Piece, dim: int, low: int, high: int) -> Piece:
    """The part of a piece between two places of a dim of its file tensor."""
    start, _ = piece.source[dim]
    at = piece.axes.index(dim)
    first = piece.target[at][0] - start
    source = (*piece.source[:dim], (low, high), *piece.source[dim + 1 :])
    target = (*piece.target[:at], (first + low, first + high), *piece.target[at + 1 :])
    return replace(piece, source=source, target=target)


def order_of(piece: Piece) -> tuple[int, ...]:
    """Dims of the file tensor in the order in which the parameter has them."""
    return tuple(axis for axis in piece.axes if axis is not None)


def require_one_dtype(dtypes: Sequence[str], where: str) -> torch.dtype:
    """The format of all tensors that fill one parameter.

    Raises:
        CheckpointError: ``mixed-dtypes``.
    """
    kinds = sorted(set(dtypes))
    if len(kinds) != 1:
        raise CheckpointError(
            "mixed-dtypes",
            f"{len(dtypes)} file tensors of dtypes {kinds} fill one parameter",
            where=where,
            next_action="convert the checkpoint to one dtype",
        )
    found: torch.dtype = getattr(torch, TORCH[kinds[0]])
    return found


def unlike_stack(name: str, piece: Piece, needed: str) -> CheckpointError:
    """A file tensor whose part of a stack cannot stay packed."""
    return CheckpointError(
        "packed-layout",
        f"{piece.tensor} gives {piece.source} for {piece.target}: not whole {needed} of out × in",
        where=name,
        next_action="plan with base_format compute: the weights are then decoded at load",
    )


def all_finite(value: Tensor) -> Tensor:
    """Whether all values are finite, 0-dim bool; the least and the largest tell, for both carry NaN on."""
    if not value.numel() or not value.is_floating_point() or value.dtype.itemsize < 2:
        return torch.ones((), dtype=torch.bool, device=value.device)
    least, most = torch.aminmax(value)
    return torch.isfinite(least) & torch.isfinite(most)
