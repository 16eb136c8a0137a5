"""How many routed rows the fullest expert-parallel rank gets.

Legend: T tokens per rank, K experts per token, E experts, e = EP degree. Functions take numbers or
columns of numbers.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

from shardwright.search_spaces.placement import Loads as Loads
from shardwright.search_spaces.placement import balanced_ranks, imbalance

EXPERT_LOAD_SPREAD = 0.5
"""Standard deviation over mean of the tokens per expert; assumed, for a trained router."""

MEMORY_QUANTILE = 0.95
"""Memory is planned for the rows that the fullest rank stays below in this share of micro-batches."""


@lru_cache(maxsize=1024)
def spread_factor(ranks: int, quantile: float | None) -> float:
    """Standard deviations by which the fullest of ``ranks`` normal loads exceeds their mean.

    Expected maximum ``sqrt(2 ln e)``; at a quantile q ``Φ⁻¹(q^(1/e))``, never below the expectation.
    """
    if ranks <= 1:
        return 0.0
    expected = math.sqrt(2 * math.log(ranks))
    return expected if quantile is None else max(expected, NormalDist().inv_cdf(quantile ** (1 / ranks)))


@lru_cache(maxsize=4096)
def placed_imbalance(loads: Loads, ep: int, balanced: bool, redundant: int) -> float:
    """Rows of the fullest rank over the mean for measured loads, mean over layers.

    Contiguous: runs of E/e experts. Balanced: as ``search_spaces/placement.py`` puts them.
    """
    return sum(_layer_imbalance(shares, ep, balanced, redundant) for shares in loads) / len(loads)


@lru_cache(maxsize=256)
def over_layers(loads: Loads) -> Loads:
    """All layers as one: what a rank keeps of every layer evens out over them."""
    return (tuple(sum(column) / len(loads) for column in zip(*loads, strict=True)),) if loads else ()


def _layer_imbalance(shares: tuple[float, ...], ep: int, balanced: bool, redundant: int) -> float:
    each = len(shares) // ep
    if not balanced:
        return max(sum(shares[rank * each : (rank + 1) * each]) for rank in range(ep)) * ep
    return imbalance(shares, balanced_ranks(shares, ep, redundant))


def rank_imbalance(
    tokens: Any,
    experts_per_token: int,
    experts: int,
    ep: Any,
    quantile: float | None = None,
    loads: Loads = (),
    balanced: Any = False,
    redundant: Any = 0,
) -> Any:
    """Rows of the fullest rank over the mean, at least 1.

    Prior: ``1 + c · sqrt(1/(T·K) + s²·e/E)``, multinomial noise and a spread s between experts (a rank
    averages E/e of them), c from ``spread_factor``. With measured loads the placement's own imbalance
    stands for the spread: ``placed + c · sqrt(1/(T·K))``. Never more than every token choosing only this
    rank's experts: ``e · min(K, E/e) / K``.
    """
    if experts == 0:
        return np.ones_like(np.asarray(ep, dtype=np.float64))[()]
    tokens, ep = np.asarray(tokens, dtype=np.float64), np.asarray(ep, dtype=np.float64)
    c = _by_value(lambda e: spread_factor(int(e), quantile), ep)
    if loads:
        triples = np.stack(np.broadcast_arrays(ep, balanced, redundant)).astype(np.int64).reshape(3, -1)
        unique, inverse = np.unique(triples, axis=1, return_inverse=True)
        known = np.array([placed_imbalance(loads, int(e), bool(b), int(r)) for e, b, r in unique.T])
        placed = known[inverse.reshape(-1)].reshape(ep.shape)
        value = placed + c * np.sqrt(1.0 / (tokens * experts_per_token))
    else:
        value = 1.0 + c * np.sqrt(1.0 / (tokens * experts_per_token) + EXPERT_LOAD_SPREAD**2 * ep / experts)
    most = ep * np.minimum(experts_per_token, experts // ep) / experts_per_token
    return np.maximum(1.0, np.minimum(value, most))[()]


def _by_value(function: Any, values: Any) -> Any:
    unique, inverse = np.unique(values, return_inverse=True)
    return np.array([function(value) for value in unique])[inverse.reshape(-1)].reshape(values.shape)


def routed_rows(
    tokens: Any,
    experts_per_token: int,
    experts: int,
    ep: Any,
    padding: Any = 1,
    quantile: float | None = None,
    loads: Loads = (),
    balanced: Any = False,
    redundant: Any = 0,
    chunks: Any = 1,
) -> Any:
    """Rows that the fullest rank computes: ``imbalance · T · K``, never divided by e, plus padding.

    Padding adds at most ``padding − 1`` rows for each local expert (copies included) and chunk; half is expected.
    """
    if experts == 0:
        return np.zeros_like(np.asarray(ep, dtype=np.float64))[()]
    worst = rank_imbalance(tokens, experts_per_token, experts, ep, quantile, loads, balanced, redundant)
    rows = np.ceil(np.asarray(tokens) * experts_per_token * worst)
    local = experts // np.asarray(ep) + np.asarray(redundant)
    return (rows + np.ceil((np.asarray(padding) - 1) * local * np.asarray(chunks) / 2))[()]
