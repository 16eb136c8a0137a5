"""One sparse latent attention around our operators: which way a row runs, what is chosen, what is handed on.

The up-projection of keys and values is absorbed, its adapter too. Where a row is no longer than the selection, every
query selects all it sees: then no indexer runs and a library attends to all keys, under the same documents
(``kernels.dsa.attention.choose``). Longer rows attend to all only where the recipe means that: in the indexers' dense
warm-up, or where it allows the faster of both ways.

Indices are handed on as the family has them, ``[B, S, K]`` of a row's keys: early rows, which see fewer keys, repeat
the query's own one, which selects nothing more in a mask and is taken out again here.
Legend: B rows, S tokens a row, T = B · S, H heads, N, R, V widths of plain key, rotated key and value, C latent width,
J indexer heads, D indexer width, K selected keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.kernels.dsa.attention.choose import Choice, choose
from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.fused_dsa_borders import Borders, refused
from shardwright.runtime.fused_dsa_parts import Halves, LatentParts, Projected, half_table, rotated_parts
from shardwright.runtime.fused_dsa_warm_up import lse_of_all
from shardwright.schemas.recipe import IndexerSpec

WAYS = "attention_ways"
"""Where a module keeps the way of every length of rows that it ran: tokens → ``Choice``."""
LOOKED_AT = "handed_choices_of"
"""Where a module keeps the sizes (B, S) of which it has looked at a choice that was handed in."""
LEARNER = "indexer_learner"
"""Where a module keeps what its indexer learns by (``runtime.fused_dsa_loss``)."""
SETTINGS = "indexer_settings"
"""Where a module keeps what the recipe says of indexers; as if it said nothing where there is none."""
UNSAID = IndexerSpec()
Scored = tuple[Tensor, ...]
"""The indexer's q ``[T, J, D]``, k ``[T, D]`` and weights ``[T, J]``, and what a kind of layer adds."""


class Learner(Protocol):
    """Takes a layer's loss and joins it to the backward of a value."""

    def attach(self, value: Tensor, loss: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class SparseAttention(LatentParts):
    """One attention and the operators that it runs."""

    def __call__(
        self, x: Tensor, tables: tuple[Tensor, Tensor] | None, borders: Borders, handed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """``[B, S, hidden]`` → the same, and the indices to hand on."""
        halves = None if tables is None else tuple(half_table(table, borders) for table in tables)
        made = self.projected(x, borders)
        q_rope, k_rope = rotated_parts(made.q_rope, made.k_rope, halves, self.layout)
        made = replace(made, q_rope=q_rope, k_rope=k_rope)
        gate = self.part("gate")(x).flatten(0, 1).unflatten(1, (-1, self.value)) if "gate" in self.roles else None
        indices = None
        tokens = borders.row_tokens
        choice = self.module.__dict__.setdefault(WAYS, {})[tokens] = self.choice(tokens)
        if choice.path == "dense":
            o = self._dense(made, gate, borders)
            if self.learns:
                o = self._attached(o, self._warm_up_loss(self.scored(x, made.q_latent, halves), made, borders))
        elif self.shared:
            if handed is None:
                raise refused(self.name, "a layer that shares its choice was handed none")
            indices = self.taken_over(handed, borders)
            o = self._over_handed(made, gate, indices, borders)
        else:
            indices, scored = self.chosen(x, made.q_latent, halves, borders)
            o, lse = self._sparse(made, gate, indices, None)
            if self.learns:
                o = self._attached(o, self._loss(scored, made, lse, indices))
        y = self.part("o")(o.reshape(borders.B, borders.S, -1))
        return y, self.handed_on(indices, borders) if self.hands_on else None

    def _over_handed(self, made: Projected, gate: Tensor | None, indices: Tensor, borders: Borders) -> Tensor:
        """A choice of another layer, looked at on the first call of each size.

        A family may hand on what a query may not see, for its mask hides that; what is left must be each key once.
        """
        bounds, size = borders.bounds(), (borders.B, borders.S)
        looked_at: set[tuple[int, int]] = self.module.__dict__.setdefault(LOOKED_AT, set())
        new = size not in looked_at
        if new:
            hidden = (indices >= 0) & ((indices < bounds[:, :1]) | (indices >= bounds[:, 1:]))
            indices = indices.masked_fill(hidden, -1)
            looked_at.add(size)
        return self._sparse(made, gate, indices, bounds, check=new)[0]

    @property
    def settings(self) -> IndexerSpec:
        """What the recipe says of indexers."""
        found: IndexerSpec = self.module.__dict__.get(SETTINGS, UNSAID)
        return found

    @property
    def learner(self) -> Learner | None:
        """What the indexer learns by; ``None`` where it is frozen, or another layer's."""
        found: Learner | None = self.module.__dict__.get(LEARNER)
        return found

    @property
    def learns(self) -> bool:
        """Whether this call's backward is the indexer's too."""
        return self.learner is not None and torch.is_grad_enabled()

    def _attached(self, o: Tensor, loss: Tensor) -> Tensor:
        assert self.learner is not None
        return self.learner.attach(o, loss)

    def _sparse(
        self, made: Projected, gate: Tensor | None, indices: Tensor, bounds: Tensor | None, *, check: bool = False
    ) -> tuple[Tensor, Tensor]:
        sinks = self.part("sinks").to(made.q_nope.dtype) if "sinks" in self.roles else None
        q_rope, k_rope = (made.q_rope, made.k_rope) if self.rope else (None, None)
        found: tuple[Tensor, Tensor] = OPERATORS["dsa"].load_op()(
            made.q_nope,
            q_rope,
            made.latent,
            k_rope,
            self.up(made.q_nope.shape[1]),
            indices,
            gate,
            sinks,
            scale=self.scale,
            bounds=bounds,
            check_indices=check,
        )
        return found

    def _loss(self, scored: Scored, made: Projected, lse: Tensor, indices: Tensor) -> Tensor:
        """KL of the attention from the indexer's scores, over the keys that were selected; mean over tokens."""
        settings = {"attention_scale": self.scale, "scale": self.index_scale}
        loss: Tensor = OPERATORS["dsa_kl"].load_op()(*scored, *self.main(made), lse, indices, **settings)
        return loss

    def _warm_up_loss(self, scored: Scored, made: Projected, borders: Borders) -> Tensor:
        """The same over all keys that a query may see."""
        q, k = self.main(made)
        settings = {"attention_scale": self.scale, "scale": self.index_scale, "cu_seqlens": borders.cu_seqlens()}
        lse = lse_of_all(q, k[:, 0], borders.first, self.scale)
        loss: Tensor = OPERATORS["dsa_kl"].load_op()(*scored, q, k, lse, None, **settings)
        return loss

    def choice(self, tokens: int) -> Choice:
        """Dense or sparse for rows of so many tokens, and why; sinks are known to the sparse operator alone."""
        return self.choice_of(tokens, self.top_k)

    def choice_of(self, tokens: int, selected: int) -> Choice:
        """The same where a query selects all of so many tokens."""
        if "sinks" in self.roles:
            return Choice("sparse", "libraries of dense attention take no sinks")
        if self.settings.stage == "dense":
            return Choice("dense", "the indexers' dense warm-up: layers attend to all keys, and the loss is over all")
        if self.learner is not None:
            return Choice("sparse", "the indexer learns from the sparse attention")
        device = self.part("o").weight.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        meant = self.settings.attention == "faster"
        return choose(tokens, selected, name, training=True, dense_is_meant=meant)

    def _dense(self, made: Projected, gate: Tensor | None, borders: Borders) -> Tensor:
        """``[T, H, V]`` of all keys that a query may see: the operator's dense door, document by document where their
        ends are known here, else torch's own attention under the documents' mask."""
        from shardwright.kernels.dsa.dense import sigmoid_gate

        up, heads = self.up(made.q_nope.shape[1]), made.q_nope.shape[1]
        if borders.ends is not None:
            rotated = (made.q_rope, made.k_rope) if self.rope else (None, None)
            parts = (made.q_nope, rotated[0], made.latent, rotated[1], up)
            door = OPERATORS["dsa"].load_op()
            attended: Tensor = door(*parts, None, gate, scale=self.scale, cu_seqlens=borders.ends)[0]
            return attended
        k_nope, v = up.expand(made.latent)
        k_rope = made.k_rope[:, None].expand(-1, heads, -1)
        q, k = torch.cat((made.q_nope, made.q_rope), -1), torch.cat((k_nope, k_rope), -1)
        q, k, v = (part.unflatten(0, (borders.B, borders.S)).transpose(1, 2) for part in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=borders.seen()[:, None], scale=self.scale)
        o = o.transpose(1, 2).flatten(0, 1)
        return o if gate is None else sigmoid_gate(o.contiguous(), gate)

    def scored(self, x: Tensor, q_latent: Tensor, halves: Halves | None) -> Scored:
        """What the indexer scores, made of detached states: with a graph where it learns."""
        with torch.set_grad_enabled(self.learns):
            q, k, weights = self.index_values(x.detach(), q_latent.detach())
            return (*rotated_parts(q, k, halves, self.index_layout), weights)

    def chosen(self, x: Tensor, q_latent: Tensor, halves: Halves | None, borders: Borders) -> tuple[Tensor, Scored]:
        """``[T, K]`` of the module's own indexer, and what it scored."""
        scored = self.scored(x, q_latent, halves)
        with torch.no_grad():
            found: Tensor = OPERATORS["dsa_indexer"].load_op()(
                *scored,
                top_k=min(self.top_k, borders.row_tokens),
                scale=self.index_scale,
                cu_seqlens=borders.cu_seqlens(),
                precision=self.settings.scores,
            )
        return found, scored

    def taken_over(self, handed: Tensor, borders: Borders) -> Tensor:
        """The choice of an earlier layer as rows of the packed sequence: a query's own key counts once."""
        flat = handed.reshape(borders.B * borders.S, -1)
        own = (borders.at % borders.row_tokens)[:, None]
        again = torch.zeros_like(flat, dtype=torch.bool)
        again[:, 1:] = (flat[:, 1:] == own) & (flat[:, :-1] == own)
        row = borders.at[:, None] - own
        return torch.where(again | (flat < 0), -1, flat + row).to(torch.int32)

    def handed_on(self, indices: Tensor | None, borders: Borders) -> Tensor:
        """Rows of the packed sequence → keys of each row, the query's own where there is none; all keys where none
        was left out."""
        if indices is None:
            every = torch.arange(borders.row_tokens, device=borders.first.device, dtype=torch.int32)
            return every.expand(borders.B, borders.S, -1)
        own = borders.at[:, None]
        row = own - own % borders.row_tokens
        return (torch.where(indices < 0, own, indices) - row).to(torch.int32).view(borders.B, borders.S, -1)


@dataclass(frozen=True)
class DenseLatentAttention(SparseAttention):
    """A layer that selects nothing: a library's attention, and our gate."""

    def choice(self, tokens: int) -> Choice:
        return Choice("dense", "the layer has no indexer: it attends to all keys")
