"""Sparse latent attention whose indexer scores pools of keys: pools in torch, then our indexer and our attention.

A pool is P neighbours of one document, counted from its first token; the last, begun one is every query's own and is
always selected. A whole pool is one key for the indexer: the mean of its tokens' keys by softmaxed gates. A query sees
pools that end no later than itself. The operator lets query t see keys up to t, so queries are put in the order
(document, place in the pool, pool): then each group of a document sees one more pool a query, as a sequence of its own.
Everything stays on the device, with sizes that are known from T.
Legend: B rows, S tokens a row, T = B · S, J indexer heads, D indexer width, P tokens of a pool, K tokens of the chosen
pools, N = T // P the most pools there can be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.kernels.dsa.attention.choose import Choice
from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.fused_dsa_borders import Borders
from shardwright.runtime.fused_dsa_layer import Scored, SparseAttention
from shardwright.runtime.fused_dsa_parts import INDEXER_PARTS, Halves, Projected

POOL_PARTS = ("pool_position", "pool_gate")


@dataclass(frozen=True)
class Pools:
    """The whole pools of packed documents."""

    pool: int
    first: Tensor
    """``[T]``: first token of each token's document."""
    at: Tensor
    """``[T]``: each token's own place."""

    @property
    def whole(self) -> Tensor:
        """``[T]``: pools of its document that a token's query may see."""
        return (self.at - self.first + 1) // self.pool

    def ends(self) -> Tensor:
        """``[N]``: last token of each pool in order, T where there are fewer."""
        T = self.at.shape[0]
        closes = (self.at - self.first + 1) % self.pool == 0
        return torch.where(closes, self.at, T).sort().values[: T // self.pool]

    def number(self) -> Tensor:
        """``[T]``: place among all pools of the last one that a token's query sees; of none, any."""
        closes = (self.at - self.first + 1) % self.pool == 0
        before = closes.cumsum(0) - closes.long()
        return (before[self.first] + self.whole - 1).clamp(0, max(self.at.shape[0] // self.pool - 1, 0))

    def keys(self, k: Tensor, gates: Tensor, position: Tensor, ends: Tensor) -> Tensor:
        """Keys ``[T, D]`` and gates ``[T, D]``, position ``[P, D]`` → keys of pools ``[N, D]``."""
        T = self.at.shape[0]
        tokens = (ends[:, None] - self.pool + 1 + torch.arange(self.pool, device=ends.device)).clamp(0, T - 1)
        wide = torch.float64 if k.dtype == torch.float64 else torch.float32
        shares = (gates[tokens].to(wide) + position.to(wide)).softmax(1).to(k.dtype)
        return (shares * k[tokens]).sum(1)

    def grouped(self) -> tuple[Tensor, Tensor]:
        """Order of the queries, and begins of their groups ``[T + 1]`` as ``cu_seqlens``.

        Queries that see no pool are groups of their own, before the others of their document.
        """
        T, device = self.at.shape[0], self.at.device
        after = self.at - self.first - (self.pool - 1)
        group = torch.where(after < 0, 0, after % self.pool + 1)
        order = (self.first * (self.pool + 1) + group).argsort(stable=True)
        group, first = group[order], self.first[order]
        begins = torch.ones(T, dtype=torch.bool, device=device)
        begins[1:] = (group[1:] != group[:-1]) | (first[1:] != first[:-1]) | (group[1:] == 0)
        starts = torch.where(begins, self.at, T).sort().values
        return order, torch.cat((starts, starts.new_full((1,), T)))

    def begun(self) -> Tensor:
        """``[T, P − 1]``: tokens up to the query of the pool that it is in, -1 behind them."""
        tokens = (self.first + self.whole * self.pool)[:, None]
        tokens = tokens + torch.arange(self.pool - 1, device=self.at.device)
        return torch.where(tokens <= self.at[:, None], tokens, -1)


@dataclass(frozen=True)
class PooledSparseAttention(SparseAttention):
    """A layer of this kind. Its indexer learns over the pools that were chosen: those that are whole."""

    pool: int

    @classmethod
    def indexer_parts(cls) -> tuple[str, ...]:
        return (*INDEXER_PARTS, *POOL_PARTS)

    @classmethod
    def further(cls) -> tuple[str, ...]:
        return ("pool",)

    def choice(self, tokens: int) -> Choice:
        """All is selected up to the tokens of the chosen pools and of one begun."""
        return self.choice_of(tokens, self.top_k + self.pool - 1)

    def pooled(self, x: Tensor, q_latent: Tensor, pools: Pools, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's q ``[T, J, D]``, keys of pools ``[N, D]`` and weights ``[T, J]``, made of detached states."""
        with torch.set_grad_enabled(self.learns):
            x = x.detach()
            q, k, weights = self.index_values(x, q_latent.detach())
            gates = F.linear(x, self.part("pool_gate")).flatten(0, 1)
            return q, pools.keys(k, gates, self.part("pool_position"), ends), weights

    def chosen(self, x: Tensor, q_latent: Tensor, halves: Halves | None, borders: Borders) -> tuple[Tensor, Scored]:
        """``[T, K + P − 1]``: tokens of the chosen pools and of the query's own, -1 for nothing.

        Behind what was scored stand the chosen pools ``[T, K / P]`` and their tokens ``[T, K]``, -1 for nothing.
        """
        pools = Pools(self.pool, borders.first, borders.at)
        ends = pools.ends()
        scored = self.pooled(x, q_latent, pools, ends)
        with torch.no_grad():
            best = self._best(scored, pools)
            starts = torch.cat((ends - self.pool + 1, ends.new_zeros(1))).to(torch.int32)
            begins = starts[best.long()].masked_fill_(best < 0, -1)
            tokens = begins[..., None] + torch.arange(self.pool, dtype=torch.int32, device=x.device)
            tokens = tokens.masked_fill_(begins[..., None] < 0, -1).flatten(1)
            return torch.cat((tokens, pools.begun().to(torch.int32)), 1), (*scored, best, tokens)

    def _best(self, scored: tuple[Tensor, Tensor, Tensor], pools: Pools) -> Tensor:
        """``[T, K / P]`` int32: the best pools of each query, -1 where it sees fewer."""
        (q, keys, weights), number = scored, pools.number()
        count = self.top_k // self.pool
        if not keys.shape[0]:
            return torch.full((q.shape[0], count), -1, dtype=torch.int32, device=q.device)
        order, starts = pools.grouped()
        found = OPERATORS["dsa_indexer"].load_op()(
            q[order].contiguous(),
            keys[number[order]].contiguous(),
            weights[order].contiguous(),
            top_k=count,
            scale=self.index_scale,
            cu_seqlens=starts,
            precision=self.settings.scores,
        )
        none = (found < 0) | (pools.whole[order] == 0)[:, None]
        best = torch.empty_like(found)
        best[order] = number[order][found.clamp_min(0).long()].to(torch.int32).masked_fill_(none, -1)
        return best

    def _loss(self, scored: Scored, made: Projected, lse: Tensor, indices: Tensor) -> Tensor:
        """KL of the attention from the indexer's scores, over the pools that were chosen; mean over tokens."""
        from shardwright.kernels.dsa.kl.pooled import dsa_pooled_kl

        q, keys, weights, chosen, tokens = scored
        teacher = (*self.main(made), lse, chosen, tokens)
        return dsa_pooled_kl(q, keys, weights, *teacher, attention_scale=self.scale, scale=self.index_scale)

    def taken_over(self, handed: Tensor, borders: Borders) -> Tensor:
        """The family says itself where a choice holds nothing."""
        flat = handed.reshape(borders.B * borders.S, -1)
        row = (borders.at // borders.S * borders.S)[:, None]
        return torch.where(flat < 0, -1, flat + row).to(torch.int32)

    def handed_on(self, indices: Tensor | None, borders: Borders) -> Tensor:
        """The family's mask is the choice alone: where nothing was left out, it is what a query may see."""
        if indices is None:
            every = torch.arange(borders.S, device=borders.first.device, dtype=torch.int32)
            return torch.where(borders.seen(), every, -1)
        row = (borders.at // borders.S * borders.S)[:, None]
        return torch.where(indices < 0, -1, indices - row).to(torch.int32).view(borders.B, borders.S, -1)
