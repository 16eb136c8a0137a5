"""Expert stacks that stay 4-bit integers in groups, as compressed-tensors writes them (Kimi K2 Thinking and others).

A stack [L, o, i] is int32 words [L, o, i / 8] and scales [L, o, i / g], both as the files have them; out before in. A
value is the bf16 number that its code times its scale rounds to. No kernel reads these codes: an expert is decoded when
its rows are multiplied. Only symmetric weights whose groups are runs of inputs stay packed.
Legend: L local experts, o out features, i in features, g values of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.checkpoints.conversion import Piece
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.packing import int4_group
from shardwright.checkpoints.packing.int4 import VALUES_PER_WORD
from shardwright.checkpoints.packing.logical import LogicalTensor
from shardwright.checkpoints.reader import Part, ShardReader
from shardwright.runtime.load.fills import FILL_BYTES, cut_source, unlike_stack
from shardwright.schemas.errors import LegalityError

FORMAT = "int4-group"
SCALES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
ONLY = ("_scale", "_shape")
"""Companions of a symmetric weight in equal runs; zero points and group numbers are others."""
SCALE_DIM = 1
"""The dim of the scales in which rows of the weight follow each other."""


@dataclass(frozen=True)
class Int4:
    """How a module's stacks stay packed: values of a group, format of the scales."""

    group: int
    scales: torch.dtype

    def __str__(self) -> str:
        return f"int4 groups of {self.group}"


@dataclass(frozen=True)
class Int4Stack:
    """A frozen weight [L, o, i]: values int32 [L, o, i / 8], scales [L, o, i / g]."""

    values: Tensor
    scales: Tensor

    kind = "int4"

    @property
    def shape(self) -> tuple[int, int, int]:
        L, N, words = self.values.shape
        return L, N, words * VALUES_PER_WORD

    def expert(self, index: int) -> Tensor:
        """One expert's weight [o, i], bf16."""
        return int4_group.decode(self.values[index], self.scales[index], torch.bfloat16)


def int4_of(names: NameMap, parameters: tuple[str, ...]) -> Int4:
    """How stacks of this format can stay packed.

    Raises:
        LegalityError: ``base-format`` for zero points, group numbers, or groups and scales of several kinds.
    """
    tensors = [names.logical(piece.tensor) for name in parameters for piece in names.pieces(name)]
    for one in tensors:
        others = [name for name in one.companions if not name.endswith(ONLY)]
        if others:
            raise refused(f"{one.name} has {others[0]}; only symmetric 4-bit groups in equal runs stay packed")
    kinds = {(one.block[-1], names.stored_dtype(_scale(one))) for one in tensors}
    if len(kinds) > 1:
        raise refused(f"{parameters[0]} and its neighbours have groups and scales of {len(kinds)} kinds")
    group, scales = kinds.pop()
    return Int4(group, SCALES[scales])


def empty_stack(stack: str, shape: tuple[int, int, int], packing: Int4) -> Int4Stack:
    """Uninitialised words and scales of a stack [L, o, i], on meta.

    Raises:
        LegalityError: ``base-format`` for inputs that are not whole words and groups.
    """
    L, N, K = shape
    if K % VALUES_PER_WORD or K % packing.group:
        raise refused(f"{stack} has {K} inputs, not whole words of {VALUES_PER_WORD} and groups of {packing.group}")
    values = torch.empty((L, N, K // VALUES_PER_WORD), dtype=torch.int32, device="meta")
    return Int4Stack(values, torch.empty((L, N, K // packing.group), dtype=packing.scales, device="meta"))


@dataclass(frozen=True)
class Int4Fill:
    """Words and scales of some rows of some experts, as the files have them.

    Attributes:
        values, scales: the parts of a rank's stack that they fill, [experts, rows, words or groups].
    """

    values: Tensor
    scales: Tensor
    parts: tuple[Part, ...]
    into: None = None

    def place(self, read: Sequence[Tensor]) -> Tensor:
        for into, value in zip((self.values, self.scales), read, strict=True):
            into.copy_(value.reshape(into.shape))
        return torch.isfinite(self.scales).all()


def int4_fills(
    held: Int4Stack, pieces: Iterable[Piece], name: str, reader: ShardReader, names: NameMap, in_out: bool
) -> Iterator[Int4Fill]:
    """Fills of this rank's part, bit for bit; only its bytes are read.

    Args:
        pieces: file tensors' parts; targets are (place, row, column) as the stack orders its matrices.

    Raises:
        CheckpointError: ``packed-layout`` where a file tensor does not hold whole rows of out × in.
    """
    _, _, K = held.shape
    group = K // held.scales.shape[2]
    row, column = (2, 1) if in_out else (1, 2)
    for piece in pieces:
        logical = names.logical(piece.tensor)
        last = len(logical.shape) - 1
        if piece.axes[row] != last - 1 or piece.axes[column] != last or piece.target[column] != (0, K):
            raise unlike_stack(name, piece, "rows")
        for some in cut_source(piece, FILL_BYTES * 2, (*[1] * last, K)):
            *lead, (start, stop) = some.source
            at = tuple(slice(*some.target[dim]) for dim in (0, row))
            parts = (
                reader.part(logical.values, (*lead, (start // VALUES_PER_WORD, stop // VALUES_PER_WORD))),
                reader.part(_scale(logical), (*lead, (start // group, stop // group))),
            )
            yield Int4Fill(held.values[at], held.scales[at], parts)


def _scale(logical: LogicalTensor) -> str:
    return next(name for name in logical.companions if name.endswith("_scale"))


def refused(what: str) -> LegalityError:
    """Weights that cannot stay packed."""
    return LegalityError(
        "base-format", what, where="decision.strategy.base_format", next_action="choose base_format compute"
    )
