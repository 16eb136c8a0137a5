"""Sparse latent attention with our operators on cut rows: queries stay, latents and indexer keys of all are gathered.

The indexer's operator takes a run of queries and the place of its first among the keys, so it runs once for each piece
of a row, on the keys up to the piece's end: scores of later keys are never made. Its choices are places in the packed
whole rows, which is all that the attention's operator needs to know of a query: one call for all. Backward gathers the
latents again and attends again, so nothing gathered outlives a layer (``context_gathered``).

What the indexer learns: each rank has the loss of its own queries over the tokens of all, and the gradient of gathered
indexer keys is summed over ranks.

Where a layer attends to all keys, torch's attention does, on keys and values that are expanded from all latents for
some heads at a time (``context_latent``).
Legend: B rows, T tokens of a rank, S of a sequence, P of a piece, H heads, N, R, V widths of plain key, rotated key and
value, C latent width, J indexer heads, D indexer width, K selected keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from shardwright.kernels.dsa.attention.choose import Choice
from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.context import Cut, gather_tokens
from shardwright.runtime.context_gathered import attended_gathered
from shardwright.runtime.context_latent import attended_latents
from shardwright.runtime.context_layers import current
from shardwright.runtime.fused_dsa_borders import Borders
from shardwright.runtime.fused_dsa_layer import DenseLatentAttention, Scored, SparseAttention
from shardwright.runtime.fused_dsa_parts import Halves, Projected
from shardwright.runtime.fused_dsa_warm_up import lse_of_all


@dataclass(frozen=True)
class Run:
    """One of a rank's pieces of one row: what the indexer scores at once."""

    queries: slice
    """Among the B·T tokens of the rank."""
    row: int
    keys: int
    """Keys of the row up to the last query."""
    start: int
    """Place of the first query in the row."""
    documents: Tensor | None
    """[keys + 1]: begins of these keys' documents in order, then ``keys`` as often as needed; ``None`` for one."""


def runs(cut: Cut, rows: int) -> Iterator[Run]:
    """The pieces of all rows, in the order of the rank's tokens."""
    P, places = cut.piece, torch.arange(cut.tokens, device=cut.positions.device)
    for row in range(rows):
        for number, piece in enumerate(cut.place.pieces):
            first, keys, documents = (2 * row + number) * P, (piece + 1) * P, None
            if cut.starts is not None:
                begins = torch.where(cut.starts[row, :keys] == places[:keys], places[:keys], keys).sort().values
                documents = torch.cat((begins, begins.new_full((1,), keys)))
            yield Run(slice(first, first + P), row, keys, piece * P, documents)


def for_rows(layer: SparseAttention, borders: Borders) -> SparseAttention:
    """The same layer, as the rows at hand need it."""
    if borders.cut is None:
        return layer
    kind = CutDenseAttention if isinstance(layer, DenseLatentAttention) else CutSparseAttention
    return kind(**{one.name: getattr(layer, one.name) for one in fields(layer)})


class CutSparseAttention(SparseAttention):
    """A layer on a rank's own tokens of cut rows."""

    def choice(self, tokens: int) -> Choice:
        """As for whole rows of so many tokens."""
        made = super().choice(tokens)
        return replace(made, reason=f"{made.reason}; rows are cut over ranks, all latents are gathered")

    def chosen(self, x: Tensor, q_latent: Tensor, halves: Halves | None, borders: Borders) -> tuple[Tensor, Scored]:
        """``[B·T, K]`` places in the packed whole rows; what was scored, with the keys of all ranks ``[B·S, D]``."""
        q, own, weights = self.scored(x, q_latent, halves)
        k, found = borders.gathered(own), []
        with torch.no_grad():
            for run in runs(current(), borders.B):
                first = run.row * borders.row_tokens
                best = OPERATORS["dsa_indexer"].load_op()(
                    q[run.queries],
                    k[first : first + run.keys],
                    weights[run.queries],
                    top_k=min(self.top_k, borders.row_tokens),
                    scale=self.index_scale,
                    query_start=run.start,
                    cu_seqlens=run.documents,
                    precision=self.settings.scores,
                )
                found.append(torch.where(best < 0, -1, best + first))
        return torch.cat(found), (q, k, weights)

    def _sparse(
        self, made: Projected, gate: Tensor | None, indices: Tensor, bounds: Tensor | None, *, check: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``[B·T, H, V]``, and lse ``[B·T, H]`` of the forward alone."""
        (B, T), (_, H, N), C = made.q_latent.shape[:2], made.q_nope.shape, made.latent.shape[1]
        door, kept = OPERATORS["dsa"].load_op(), list[Tensor]()

        def attend(part: Tensor, whole: Tensor, heads: slice) -> Tensor:
            q_nope, q_rope = part.transpose(1, 2).flatten(0, 1).split((N, self.rope), dim=-1)
            latent, k_rope = whole.flatten(0, 2).split((C, self.rope), dim=-1)
            rotated = (q_rope, k_rope) if self.rope else (None, None)
            settings = {"scale": self.scale, "bounds": bounds, "check_indices": check}
            o, lse = door(q_nope, rotated[0], latent, rotated[1], self.up(H), indices, None, None, **settings)
            if not kept:
                kept.append(lse)
            attended: Tensor = o.unflatten(0, (B, T)).transpose(1, 2)
            return attended

        given, heads = self._exchanged(made), (slice(0, H),)
        o = attended_gathered(*given, current().place, attend, heads, self._trained)
        return _gated(o.transpose(1, 2).flatten(0, 1), gate), kept[0]

    def _trained(self) -> tuple[nn.Parameter, ...]:
        """What is trained of the projection that is absorbed."""
        return tuple(one for one in self.expansion.parameters() if one.requires_grad)

    def _dense(self, made: Projected, gate: Tensor | None, borders: Borders) -> Tensor:
        """``[B·T, H, V]`` of all keys that a query may see."""
        widths = (made.latent.shape[1], self.nope, self.value)
        o = attended_latents(current(), *self._exchanged(made), self.expansion, widths, self.scale)
        return _gated(o.transpose(1, 2).flatten(0, 1), gate)

    def _exchanged(self, made: Projected) -> tuple[Tensor, Tensor]:
        """Queries ``[B, H, T, N + R]`` that stay, latents with their rotated keys ``[B, 1, T, C + R]`` that travel."""
        B, T = made.q_latent.shape[:2]
        query = torch.cat((made.q_nope, made.q_rope), -1).unflatten(0, (B, T)).transpose(1, 2)
        return query, torch.cat((made.latent, made.k_rope), -1).view(B, 1, T, -1)

    def _loss(self, scored: Scored, made: Projected, lse: Tensor, indices: Tensor) -> Tensor:
        """Of this rank's queries, over the tokens of all ranks."""
        q_main, k_main = self._teacher(made)
        settings = {"attention_scale": self.scale, "scale": self.index_scale}
        loss: Tensor = OPERATORS["dsa_kl"].load_op()(*scored, q_main, k_main, lse, indices, **settings)
        return loss / current().place.cp

    def _warm_up_loss(self, scored: Scored, made: Projected, borders: Borders) -> Tensor:
        """The same over all keys that a query may see."""
        q, own, weights = scored
        k, (q_main, k_main) = borders.gathered(own), self._teacher(made)
        total, pieces = weights.new_zeros((), dtype=torch.float32), 2 * borders.B * current().place.cp
        for run in runs(current(), borders.B):
            first, at = run.row * borders.row_tokens, run.queries
            keys = slice(first, first + run.keys)
            lse = lse_of_all(q_main[at], k_main[keys, 0], borders.first[at] - first, self.scale, run.start)
            settings = {"attention_scale": self.scale, "scale": self.index_scale}
            place = {"query_start": run.start, "cu_seqlens": run.documents}
            teacher = (q_main[at], k_main[keys], lse, None)
            total = total + OPERATORS["dsa_kl"].load_op()(q[at], k[keys], weights[at], *teacher, **settings, **place)
        return total / pieces

    @torch.no_grad()
    def _teacher(self, made: Projected) -> tuple[Tensor, Tensor]:
        """Queries ``[B·T, H, C + R]`` and keys ``[B·S, 1, C + R]`` of the attention, absorbed."""
        B, T = made.q_latent.shape[:2]
        q, own = self.main(made)
        return q, gather_tokens(own.view(B, 1, T, -1), current().place).flatten(0, 2)[:, None]


class CutDenseAttention(CutSparseAttention, DenseLatentAttention):
    """A layer that selects nothing, on a rank's own tokens."""


def _gated(o: Tensor, gate: Tensor | None) -> Tensor:
    from shardwright.kernels.dsa.dense import sigmoid_gate

    return o if gate is None else sigmoid_gate(o.contiguous(), gate)
