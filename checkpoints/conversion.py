"""Symbolic tensors: which box of which file tensor fills which box of a parameter.

transformers describes how files become parameters as a chain of operations (stack, concatenate, transpose, split).
Here the chain runs on boxes instead of values, so that a rank can later read only what it owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Box = tuple[tuple[int, int], ...]


class UnsupportedConversion(ValueError):
    """An operation that does not map boxes to boxes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One file tensor's part in a symbolic tensor.

    Attributes:
        tensor: logical name of the file tensor.
        source: box inside the file tensor.
        target: box inside the symbolic tensor.
        axes: for each dim of the target, the dim of the file tensor that feeds it, or ``None`` for a stacked dim.
    """

    tensor: str
    source: Box
    target: Box
    axes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Symbolic:
    """A tensor known by its shape and by where its values come from."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of_file(cls, tensor: str, shape: tuple[int, ...]) -> Symbolic:
        box = tuple((0, dim) for dim in shape)
        return cls(shape, (Piece(tensor, box, box, tuple(range(len(shape)))),))


def stack(parts: Sequence[Symbolic], dim: int) -> Symbolic:
    """New dim ``dim``; every part has the same shape."""
    if len({part.shape for part in parts}) != 1:
        raise UnsupportedConversion(f"cannot stack shapes {sorted({part.shape for part in parts})}")
    pieces = [
        replace(
            piece,
            target=(*piece.target[:dim], (index, index + 1), *piece.target[dim:]),
            axes=(*piece.axes[:dim], None, *piece.axes[dim:]),
        )
        for index, part in enumerate(parts)
        for piece in part.pieces
    ]
    shape = parts[0].shape
    return Symbolic((*shape[:dim], len(parts), *shape[dim:]), tuple(pieces))


def concatenate(parts: Sequence[Symbolic], dim: int) -> Symbolic:
    """Along an existing dim."""
    if len({(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) != 1:
        raise UnsupportedConversion(f"cannot concatenate shapes {[part.shape for part in parts]} along dim {dim}")
    pieces = []
    offset = 0
    for part in parts:
        for piece in part.pieces:
            first, last = piece.target[dim]
            moved = (*piece.target[:dim], (first + offset, last + offset), *piece.target[dim + 1 :])
            pieces.append(replace(piece, target=moved))
        offset += part.shape[dim]
    shape = parts[0].shape
    return Symbolic((*shape[:dim], offset, *shape[dim + 1 :]), tuple(pieces))


def transpose(part: Symbolic, first: int, second: int) -> Symbolic:
    """Exchange two dims."""
    rank = len(part.shape)
    order = list(range(rank))
    order[first], order[second] = order[second], order[first]

    def swap(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[place] for place in order)

    pieces = tuple(replace(piece, target=swap(piece.target), axes=swap(piece.axes)) for piece in part.pieces)
    return Symbolic(swap(part.shape), pieces)


def split(part: Symbolic, sizes: Sequence[int], dim: int) -> list[Symbolic]:
    """Cut along a dim into parts of the given sizes."""
    if sum(sizes) != part.shape[dim]:
        raise UnsupportedConversion(f"cannot split {part.shape} along dim {dim} into {list(sizes)}")
    parts = []
    offset = 0
    for size in sizes:
        cut = tuple((offset, offset + size) if place == dim else (0, full) for place, full in enumerate(part.shape))
        pieces = [moved for piece in part.pieces if (moved := intersect(piece, cut)) is not None]
        parts.append(Symbolic(tuple(stop - start for start, stop in cut), tuple(pieces)))
        offset += size
    return parts


def intersect(piece: Piece, box: Box) -> Piece | None:
    """The part of a piece inside ``box`` of the target, in coordinates of that box; ``None`` when empty."""
    source = list(piece.source)
    target = []
    for (start, stop), (low, high), axis in zip(piece.target, box, piece.axes, strict=True):
        first, last = max(start, low), min(stop, high)
        if first >= last:
            return None
        target.append((first - low, last - low))
        if axis is not None:
            begin = source[axis][0] + first - start
            source[axis] = (begin, begin + last - first)
    return replace(piece, source=tuple(source), target=tuple(target))


def run_chain(
    operations: Sequence[Any],
    collected: dict[str, list[Symbolic]],
    sources: Sequence[str],
    targets: Sequence[str],
    expected: dict[str, tuple[int, ...]],
) -> dict[str, Symbolic]:
    """Run one converter's operations on boxes.

    Args:
        operations: transformers' operation objects; only their class names and sizes are read.
        collected: source pattern → file tensors, in the order of their names.
        sources, targets: the converter's patterns, in order.
        expected: target pattern → shape of the parameter it stands for (where known).

    Returns:
        Target pattern → symbolic tensor.

    Raises:
        UnsupportedConversion: an operation that moves single elements, or parts that do not fit.
    """
    state: dict[str, list[Symbolic]] = dict(collected)
    for operation in operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist":
            single = len(state) == 1
            state = {
                (targets[0] if single else pattern): [stack(parts, operation.dim)] for pattern, parts in state.items()
            }
        elif kind == "Concatenate" and getattr(operation, "num_shards_attribute", None) is None:
            order = [pattern for pattern in sources if pattern in state]
            state = {targets[0]: [concatenate([part for key in order for part in state[key]], operation.dim)]}
        elif kind == "Transpose":
            part = _only(state)
            if not operation.check_dims or part.shape != expected.get(targets[0]):
                part = transpose(part, operation.dim0, operation.dim1)
            state = {sources[0] if len(targets) > 1 else targets[0]: [part]}
        elif kind == "Chunk" and getattr(operation, "num_shards_attribute", None) is None:
            part = _only(state)
            size = -(-part.shape[operation.dim] // len(targets))
            sizes = [min(size, part.shape[operation.dim] - size * place) for place in range(len(targets))]
            state = dict(zip(targets, ([cut] for cut in split(part, sizes, operation.dim)), strict=True))
        elif kind == "Split":
            part = _only(state)
            sizes = [expected[target][operation.dim] for target in targets if target in expected]
            state = dict(zip(targets, ([cut] for cut in split(part, sizes, operation.dim)), strict=True))
        else:
            raise UnsupportedConversion(f"{kind} does not map whole boxes")
    return {pattern: _one(parts) for pattern, parts in state.items()}


def _only(state: dict[str, list[Symbolic]]) -> Symbolic:
    if len(state) != 1:
        raise UnsupportedConversion("an operation on one tensor got several")
    return _one(next(iter(state.values())))


def _one(parts: list[Symbolic]) -> Symbolic:
    if len(parts) != 1:
        raise UnsupportedConversion(f"{len(parts)} file tensors for one parameter")
    return parts[0]
