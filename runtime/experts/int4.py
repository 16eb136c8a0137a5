"""Expert stacks that stay 4-bit integers in groups, as compressed-tensors writes them (Kimi K2 Thinking and others).

A stack [L, o, i] is int32 words [L, o, i / 8] and scales [L, o, i / g], both as the files have them; out before in. A
value is the bf16 number that its code times its scale rounds to. No kernel reads these codes: an expert is decoded when
its rows are multiplied. Only symmetric weights whose groups are runs of inputs stay packed.
Legend: L local experts, o out features, i in features, g values of a group.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.checkpoints.conversion import Box, Piece, intersect
from shardwright.checkpoints.names import NameMap
from shardwright.checkpoints.packing import int4_group
from shardwright.checkpoints.packing.int4 import VALUES_PER_WORD
from shardwright.checkpoints.packing.logical import LogicalTensor
from shardwright.checkpoints.reader import ShardReader
from shardwright.runtime.experts.placement import Slots, runs_of
from shardwright.schemas.errors import CheckpointError, LegalityError

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


def load_int4(
    held: Int4Stack,
    experts: Slots,
    rows: tuple[int, int],
    name: str,
    reader: ShardReader,
    names: NameMap,
    in_out: bool,
) -> None:
    """Fill this rank's part, bit for bit; only its bytes are read. Arguments as ``load_stack``'s.

    Raises:
        CheckpointError: ``packed-layout`` where a file tensor does not hold whole rows of out × in.
    """
    _, _, K = held.shape
    group = K // held.scales.shape[2]
    matrix = ((0, K), rows) if in_out else (rows, (0, K))
    row, column = (2, 1) if in_out else (1, 2)
    boxes: list[tuple[int, Box]] = [(place, ((first, stop), *matrix)) for place, first, stop in runs_of(experts)]
    for (place, box), whole in itertools.product(boxes, names.pieces(name)):
        piece = intersect(whole, box)
        if piece is None:
            continue
        logical = names.logical(piece.tensor)
        last = len(logical.shape) - 1
        if piece.axes[row] != last - 1 or piece.axes[column] != last or piece.target[column] != (0, K):
            raise _layout(name, piece)
        *lead, (start, stop) = piece.source
        (first, end), (low, high) = piece.target[0], piece.target[row]
        at = (slice(place + first, place + end), slice(low, high))
        for part, tensor, width in (
            (held.values, logical.values, VALUES_PER_WORD),
            (held.scales, _scale(logical), group),
        ):
            read = reader.read(tensor, (*lead, (start // width, stop // width)))
            part[at] = read.reshape(end - first, *read.shape[-2:]).to(part.device)


def _scale(logical: LogicalTensor) -> str:
    return next(name for name in logical.companions if name.endswith("_scale"))


def refused(what: str) -> LegalityError:
    """Weights that cannot stay packed."""
    return LegalityError(
        "base-format", what, where="decision.strategy.base_format", next_action="choose base_format compute"
    )


def _layout(name: str, piece: Piece) -> CheckpointError:
    return CheckpointError(
        "packed-layout",
        f"{piece.tensor} gives {piece.source} for {piece.target}: not whole rows of out × in",
        where=name,
        next_action="plan with base_format compute: the weights are then decoded at load",
    )
