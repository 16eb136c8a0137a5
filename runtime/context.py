"""Context parallelism: one sequence over the ranks of a group, and what passes between them.

A sequence is cut into 2·cp pieces; rank i holds the i-th from the front and the i-th from the end, so that causal work
is even. Positions and labels are those of the whole sequence, made before it is cut. Everything but attention,
recurrent states and convolutions works on the tokens at hand; losses, loads and gradients are sums over ranks anyway.

Inside :func:`cutting` the rows that run are cut; elsewhere a rank runs whole sequences, as the checks do.
Legend: B sequences, S tokens a sequence, T = S / cp tokens of a rank, P = S / (2·cp) tokens of a piece, cp ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.runtime.batch import MicroBatch
from shardwright.schemas.errors import LegalityError

CONTEXT = "context"
"""Where a model keeps the place of its rank, where its sequences are cut."""


@dataclass(frozen=True)
class Place:
    """A rank's place among those that share its sequences."""

    cp: int
    rank: int
    group: dist.ProcessGroup

    @property
    def pieces(self) -> tuple[int, int]:
        """Numbers of this rank's pieces, in the order of the sequence."""
        return self.rank, 2 * self.cp - 1 - self.rank

    def own(self, whole: Tensor) -> Tensor:
        """[B, S, …] → [B, T, …]: this rank's two pieces."""
        parts = whole.chunk(2 * self.cp, dim=1)
        return torch.cat([parts[piece] for piece in self.pieces], dim=1)


@dataclass(frozen=True)
class Parts:
    """Parts of documents among B·T tokens of a rank, one row after another; none crosses from one piece to the next.

    Attributes:
        bounds: of all parts.
        first, last: number of each piece's first and last part, [2·B] by row and piece.
        continues: whether a piece's first part began before the piece.
    """

    bounds: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    continues: tuple[bool, ...]

    @property
    def passes(self) -> tuple[bool, ...]:
        """Whether what arrives at a piece goes on behind it: no document begins in it."""
        return tuple(a == b and on for a, b, on in zip(self.first, self.last, self.continues, strict=True))

    @property
    def sizes(self) -> list[int]:
        """Tokens of each part."""
        return [stop - start for start, stop in pairwise(self.bounds)]


@dataclass(frozen=True)
class Cut:
    """A micro-batch that is cut.

    Attributes:
        place: of this rank.
        tokens: S.
        positions: [B, T] of this rank's tokens in their documents.
        starts: [B, S] place of the first token of each token's document; ``None`` where rows are single documents.
        earliest: for each of this rank's pieces, the first place that one of its tokens sees in some row.
        packed: the parts of documents that this rank holds.
    """

    place: Place
    tokens: int
    positions: Tensor
    starts: Tensor | None
    earliest: tuple[int, int]
    packed: Parts

    @property
    def piece(self) -> int:
        """P."""
        return self.tokens // (2 * self.place.cp)


_active: list[Cut] = []


@contextmanager
def cutting(cut: Cut | None) -> Iterator[None]:
    """Inside the block the rows that run are cut so; ``None`` changes nothing."""
    if cut is None:
        yield
        return
    _active.append(cut)
    try:
        yield
    finally:
        _active.pop()


def active() -> Cut | None:
    """How the rows that run now are cut; ``None`` where they are whole."""
    return _active[-1] if _active else None


def cut_batch(batch: MicroBatch, place: Place) -> tuple[MicroBatch, Cut]:
    """This rank's tokens of a whole micro-batch, with their positions.

    Raises:
        LegalityError: ``context-length`` where a sequence is not whole pieces, ``context-images``.
    """
    tokens, pieces = batch.ids.shape[1], 2 * place.cp
    if tokens % pieces:
        raise LegalityError(
            "context-length",
            f"{tokens} tokens do not divide into 2·cp = {pieces} pieces",
            where="decision.strategy.mesh.cp",
            next_action="choose sequence_tokens that divides, or another cp",
        )
    if batch.images is not None:
        raise LegalityError(
            "context-images",
            "a sequence with images is not cut: an image's patches would lie on several ranks",
            where="decision.strategy.mesh.cp",
            next_action="choose cp 1 for data with images",
        )
    index = torch.arange(tokens, device=batch.ids.device).expand(batch.ids.shape)
    size = tokens // pieces
    starts, earliest = None, (0, 0)
    if batch.positions is not None and bool((batch.positions[:, 1:] == 0).any()):
        starts = index - batch.positions
        first = starts[:, ::size].amin(0).tolist()
        earliest = (int(first[place.pieces[0]]), int(first[place.pieces[1]]))
    positions = place.own(index if starts is None else index - starts)
    mine = MicroBatch(place.own(batch.ids), place.own(batch.labels), positions)
    return mine, Cut(place, tokens, positions, starts, earliest, _parts(positions, size))


def _parts(positions: Tensor, size: int) -> Parts:
    """Parts of documents in [B, T] positions, T of two pieces of ``size`` tokens."""
    pieces = positions.reshape(-1, size).cpu()
    bounds, first, last = [0], [], []
    for number, piece in enumerate(pieces):
        first.append(len(bounds) - 1)
        inside = (torch.nonzero(piece[1:] == 0).flatten() + 1 + number * size).tolist()
        bounds += [*inside, (number + 1) * size]
        last.append(len(bounds) - 2)
    return Parts(tuple(bounds), tuple(first), tuple(last), tuple((pieces[:, 0] != 0).tolist()))


class _Gather(torch.autograd.Function):
    """[2, …] of each rank's pieces → [2·cp, …] in the order of the sequence; gradients are added in fp32."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, place: Place) -> Tensor:
        ctx.place = place
        whole = own.new_empty((place.cp * 2, *own.shape[1:]))
        dist.all_gather_into_tensor(whole, own.contiguous(), group=place.group)
        return whole[_in_sequence(place.cp, own.device)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        return _sum_of_own(wide, ctx.place).to(gradient.dtype), None


def _sum_of_own(pieces: Tensor, place: Place) -> Tensor:
    """[2·cp, …] of every rank, in the order of the sequence → [2, …]: the sums of this rank's pieces. A collective."""
    by_rank = pieces.new_empty(pieces.shape)
    by_rank[_in_sequence(place.cp, pieces.device)] = pieces
    own = pieces.new_empty((2, *pieces.shape[1:]))
    dist.reduce_scatter_tensor(own, by_rank, group=place.group)
    return own


def _in_sequence(cp: int, device: torch.device) -> Tensor:
    """[2·cp] where each piece of the sequence lies when ranks stand one after another."""
    front = [2 * rank for rank in range(cp)]
    return torch.tensor([*front, *(place + 1 for place in reversed(front))], device=device)


def gather_pieces(own: Tensor, place: Place) -> Tensor:
    """[2, …] of this rank's pieces → [2·cp, …] of all, in order; a gradient sums all ranks'. A collective."""
    return cast(Tensor, _Gather.apply(own, place))


def gather_tokens(own: Tensor, place: Place) -> Tensor:
    """[B, h, T, d] → [B, h, S, d]: the tokens of all ranks in the order of the sequence. A collective."""
    B, h, T, d = own.shape
    pieces = own.reshape(B, h, 2, T // 2, d).permute(2, 0, 1, 3, 4)
    return gather_pieces(pieces, place).permute(1, 2, 0, 3, 4).reshape(B, h, T * place.cp, d)


def own_sum(whole: Tensor, place: Place) -> Tensor:
    """[B, h, S, d] of every rank → [B, h, T, d]: the sums at this rank's tokens. A collective; has no gradient."""
    B, h, S, d = whole.shape
    pieces = whole.reshape(B, h, 2 * place.cp, -1, d).permute(2, 0, 1, 3, 4)
    return _sum_of_own(pieces, place).permute(1, 2, 0, 3, 4).reshape(B, h, S // place.cp, d)
