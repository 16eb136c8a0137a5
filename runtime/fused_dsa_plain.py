"""Indexers where the family's own code runs: they choose as the recipe says and learn by the same loss.

That is the plain model of the first step's check, and the live one while its fusions are off. All in plain torch, keys
and values as the module itself projects them, some queries at a time. Where the fused layer attends to all keys, the
family's own indexer selects all; where it scores in fp8, its choice is made here, of values that were rounded the same
way, and handed to the family's attention.
Legend: B rows, S tokens a row, T = B · S, N keys (T, or those of all ranks where rows are cut), H heads, M attention
width, J indexer heads, K selected keys, P tokens of a pool.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.runtime.context_pieces import members
from shardwright.runtime.fused_dsa_borders import Borders
from shardwright.runtime.fused_dsa_layer import SparseAttention
from shardwright.runtime.fused_dsa_parts import NOT_ROTATED, half_table
from shardwright.runtime.fused_dsa_pooled import PooledSparseAttention, Pools

SCORES = 1 << 26
"""Most scores, over queries, heads and keys, that are alive at once."""
BY_POSITIONS = ("hidden_states", "position_embeddings")
BY_MASK = ("x", "attention_mask")
"""Arguments of an attention's forward, as families order them."""
LARGEST_E4M3 = 448.0
LEAST = 1e-12
"""Largest value of a row that counts as one, so that a row of zeros has a scale."""
Tables = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Selected:
    """What a plain layer scored and chose."""

    q: Tensor
    k: Tensor
    """Of keys, or of pools."""
    weights: Tensor
    indices: Tensor
    """``[T, ·]`` tokens that are attended to, -1 for nothing."""
    pools: Tensor | None = None
    """``[T, K / P]``, -1 for nothing."""


def plain_loss(layer: SparseAttention, x: Tensor, tables: Tables, borders: Borders) -> Tensor:
    """The loss of one layer: over what it selected, or over all keys in the dense warm-up; mean over tokens."""
    from shardwright.kernels.dsa.indexer.reference import scores_at_reference, scores_reference
    from shardwright.kernels.dsa.kl.reference import kl_rows_reference

    x, dense = x.detach(), layer.settings.stage == "dense"
    q_main, k_main = _main(layer, x, tables, borders)
    chosen = plain_choice(layer, x, tables, borders)
    (T, H, _), N = q_main.shape, k_main.shape[0]
    total = x.new_zeros((), dtype=k_main.dtype)
    for rows in _pieces(T, H * N):
        seen = _documents(borders, rows) if dense else members(chosen.indices[rows], N)
        share = _shares(layer, q_main[rows], k_main, seen)
        q, weights = chosen.q[rows], chosen.weights[rows]
        if dense:
            here, scores = seen, scores_reference(q, chosen.k, weights, layer.index_scale)
        else:
            scored = (chosen.indices if chosen.pools is None else chosen.pools)[rows]
            here, scores = scored >= 0, scores_at_reference(q, chosen.k, weights, scored, layer.index_scale)
            tokens = chosen.indices[rows] if chosen.pools is None else chosen.indices[rows, : layer.top_k]
            share = torch.where(tokens >= 0, share.gather(1, tokens.clamp_min(0).long()), 0.0)
            share = share.unflatten(1, (scored.shape[1], -1)).sum(-1)
        mass = share.sum(-1, keepdim=True)
        target = torch.where(mass > 0, share / mass, 0.0)
        total = total + kl_rows_reference(target, scores, here).sum()
    return total / max(1, N)


def plain_choice(layer: SparseAttention, x: Tensor, tables: Tables, borders: Borders) -> Selected:
    """The choice of a module's own indexer, its scores differentiable."""
    x = x.detach()
    with torch.no_grad():
        q_latent = layer.projected(x, borders).q_latent
    q, k, weights = layer.index_values(x, q_latent)
    if not isinstance(layer, PooledSparseAttention):
        q, k = (_turned(part, tables, layer.index_layout, borders) for part in (q, k))
        k = borders.gathered(k)
        best = _best(layer, q, k, weights, borders.keys, borders, min(layer.top_k, borders.row_tokens))
        return Selected(q, k, weights, best)
    pools = Pools(layer.pool, borders.first, borders.at)
    ends = pools.ends()
    gates = F.linear(x, layer.part("pool_gate")).flatten(0, 1)
    keys = pools.keys(k, gates, layer.part("pool_position"), ends)
    best = _best(layer, q, keys, weights, ends, borders, layer.top_k // layer.pool)
    begins = torch.cat((ends - layer.pool + 1, ends.new_zeros(1)))[best.long()]
    tokens = begins[..., None] + torch.arange(layer.pool, device=x.device)
    tokens = tokens.masked_fill(best[..., None] < 0, -1).flatten(1)
    return Selected(q, keys, weights, torch.cat((tokens, pools.begun()), 1).to(torch.int32), best)


@torch.no_grad()
def _best(
    layer: SparseAttention, q: Tensor, k: Tensor, weights: Tensor, ends: Tensor, borders: Borders, count: int
) -> Tensor:
    """``[T, count]`` int32: the best keys, or pools, of each query; ``ends`` are their last tokens, N for none."""
    from shardwright.kernels.dsa.indexer.reference import scores_reference, select_reference

    (T, J, _), N = q.shape, borders.B * borders.row_tokens
    if layer.settings.scores == "fp8":
        q, k = rounded(q), rounded(k)
    found = []
    for rows in _pieces(T, J * max(1, k.shape[0])):
        seen = _documents(borders, rows).gather(1, ends.clamp(max=N - 1).expand(len(borders.at[rows]), -1))
        scores = scores_reference(q[rows], k, weights[rows], layer.index_scale)
        found.append(select_reference(scores, seen & (ends < N), count))
    return torch.cat(found)


@torch.no_grad()
def _shares(layer: SparseAttention, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """``[rows, N]``: the attention's probabilities over what is seen, summed over heads."""
    logits = torch.einsum("chm,shm->chs", q.to(k.dtype), k) * layer.scale
    logits = logits.masked_fill(~seen[:, None], float("-inf"))
    lse = logits.logsumexp(-1)
    if "sinks" in layer.roles:
        lse = torch.logaddexp(lse, layer.part("sinks").to(lse.dtype))
    return torch.exp(logits - lse[..., None]).sum(1)


def _documents(borders: Borders, rows: slice) -> Tensor:
    """``[rows, N]``: the keys that queries may see."""
    at, first, keys = borders.at[rows, None], borders.first[rows, None], borders.keys
    return (keys <= at) & (keys >= first)


def _pieces(T: int, row: int) -> Iterator[slice]:
    """Runs of queries with so many scores each, ``SCORES`` of them at once."""
    step = max(1, SCORES // max(1, row))
    return (slice(first, first + step) for first in range(0, T, step))


def rounded(x: Tensor) -> Tensor:
    """Rows as e4m3 with a scale each, and back in fp32: what scores in fp8 are made of."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(LEAST) / LARGEST_E4M3
    return (wide / scale).to(torch.float8_e4m3fn).float() * scale


def attach_plain(layer: SparseAttention) -> None:
    """Join the plain loss of a module that runs the family's code to its backward, while its indexer learns."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        learner = layer.learner
        if learner is None or _is_fused(module) or not torch.is_grad_enabled():
            return output
        x, tables, borders = _called(module, args, kwargs)
        loss = plain_loss(layer, x, tables, borders)
        if isinstance(output, Tensor):
            return learner.attach(output, loss)
        return (learner.attach(output[0], loss), *output[1:])

    layer.module.register_forward_hook(hook, with_kwargs=True)


def follow(live: SparseAttention, plain: SparseAttention) -> None:
    """Make the indexer of a module that runs the family's code select what the recipe has the live layer select."""
    indexer = getattr(plain.module, "indexer", None)
    if indexer is None:
        return
    own, choose = indexer.index_topk, indexer.forward
    latest: list[tuple[Tensor, Tables, Borders]] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_fused(module):
            return
        x, tables, borders = _called(module, args, kwargs)
        latest[:] = [(x, tables, borders)]
        pool = plain.pool if isinstance(plain, PooledSparseAttention) else 1
        everything = -(-borders.row_tokens // pool) * pool
        indexer.index_topk = everything if live.choice(borders.row_tokens).path == "dense" else own

    def choice(*args: Any, **kwargs: Any) -> Any:
        given = latest.pop() if latest else None
        if given is None or plain.settings.scores == "exact" or live.choice(given[2].row_tokens).path == "dense":
            return choose(*args, **kwargs)
        x, tables, borders = given
        with torch.no_grad():
            chosen = plain.handed_on(plain_choice(plain, x, tables, borders).indices, borders)
            return _as_scores(chosen, borders.row_tokens) if _by_mask(plain.module) else chosen

    plain.module.register_forward_pre_hook(before, with_kwargs=True)
    indexer.forward = choice


def _by_mask(module: nn.Module) -> bool:
    """Whether a module is called with hidden states and a mask alone: its indexer returns scores ``[B, S, S]``."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:] == BY_MASK


def _as_scores(chosen: Tensor, keys: int) -> Tensor:
    """``[B, S, K]`` of so many keys of each row as scores of which they are the highest."""
    return torch.zeros((*chosen.shape[:2], keys), device=chosen.device).scatter_(-1, chosen.long(), 1.0)


def _is_fused(module: nn.Module) -> bool:
    """Whether its forward is now the fused one."""
    return bool(getattr(module.__dict__.get("forward"), "fused", False))


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tables, Borders]:
    """Hidden states, tables of the rotation, documents: of a module called by positions, or by a mask alone."""
    named = {**dict(zip(BY_MASK if _by_mask(module) else BY_POSITIONS, args, strict=False)), **kwargs}
    if _by_mask(module):
        x, mask = named["x"], named.get("attention_mask")
        return x, None, Borders.of_mask(x, mask)
    x = named["hidden_states"]
    return x, named.get("position_embeddings"), Borders.of(x, named.get("position_ids"))


def _main(layer: SparseAttention, x: Tensor, tables: Tables, borders: Borders) -> tuple[Tensor, Tensor]:
    """Queries ``[T, H, M]`` and keys ``[N, H, M]`` of the attention, keys projected up, in fp32 (fp64 of fp64)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        made = layer.projected(x, borders)
        heads = made.q_nope.shape[1]
        keys = layer.expansion(borders.gathered(made.latent)).unflatten(-1, (heads, -1))[..., : layer.nope]
        rotated = borders.gathered(_turned(made.k_rope, tables, layer.layout, borders))
        rotated = rotated[:, None].expand(-1, heads, -1)
        q = torch.cat((made.q_nope, _turned(made.q_rope, tables, layer.layout, borders)), -1)
        return q, torch.cat((keys, rotated), -1).to(wide)


def _turned(part: Tensor, tables: Tables, layout: str, borders: Borders) -> Tensor:
    from shardwright.kernels.dsa.indexer.reference import rotate_reference

    if tables is None or layout == NOT_ROTATED:
        return part
    cos, sin = (half_table(table, borders) for table in tables)
    return rotate_reference(part, cos, sin, layout)
