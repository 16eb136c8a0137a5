"""After the scan: how many layers of each kind to recompute, and the axes that the scan left at their default.

A plan's time without any recomputation bounds it from below, so the scan's plans are taken in that order and
the refinement ends where the bound is no better than the best found.
"""

from __future__ import annotations

import numpy as np

from shardwright.agents.strategy.complete import Completion, with_layers
from shardwright.agents.strategy.oracle import Priced, Scan
from shardwright.agents.strategy.pricing import Pricer
from shardwright.search_spaces.axes import SCHEDULE
from shardwright.search_spaces.axes.base import draws_of
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost.plans import plans_of
from shardwright.search_spaces.space import strategy_from, values_of

MOST_PLANS = 48
"""Plans whose recomputed layers are chosen, most promising first."""


def refine(context: SearchContext, found: Scan, complete: Completion) -> Priced:
    """The best plan after choosing recomputed layers and the finer axes."""
    best = found.best
    if context.explore:
        best = min(best, finer_axes(context, best, found.pricer), key=lambda plan: plan.rank_key)
    if context.admits("checkpointing", "layers"):
        best = min((best, *some_layers(context, found, best, complete)), key=lambda plan: plan.rank_key)
        if context.explore:
            best = min(best, finer_axes(context, best, found.pricer), key=lambda plan: plan.rank_key)
    return best


def some_layers(context: SearchContext, found: Scan, best: Priced, complete: Completion) -> list[Priced]:
    """Plans with the best count of recomputed layers that beat the best; the fastest last."""
    plans, columns = found.table.plans, found.columns
    none = np.flatnonzero(plans.recomputed.sum(axis=0) == 0)
    limit = best.cost.time.step_ms if best.within_margin else float("inf")
    promising = none[(columns.step_ms[none] < limit) & ~columns.within_margin[none]]
    promising = promising[np.argsort(columns.step_ms[promising], kind="stable")][:MOST_PLANS]
    better: list[Priced] = []
    for position in promising:
        if columns.step_ms[position] >= limit:
            break
        counts, step_ms, fits = complete.best_counts(plans.take(slice(position, position + 1)))
        if not fits or step_ms >= limit:
            continue
        limit = step_ms
        strategy = with_layers(context, found.table.strategy(int(position)), counts)
        better.append(Priced(strategy, found.pricer.report(strategy)))
    return better


def finer_axes(context: SearchContext, plan: Priced, pricer: Pricer) -> Priced:
    """The best over all values of the axes that the scan kept at their default, for one mesh."""
    combinations = [draws_of(plan.strategy)]
    for axis in (one for one in SCHEDULE if one.refines):
        combinations = [
            {**draws, axis.name: value} for draws in combinations for value in values_of(context, axis, draws)
        ]
    strategies = [strategy_from(draws) for draws in combinations]
    columns = pricer.columns(plans_of(strategies, context.profile))
    winner = strategies[int(columns.order()[0])]
    return Priced(winner, pricer.report(winner))
