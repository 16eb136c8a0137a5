"""The exhaustive scan: every legal strategy priced, in one fixed order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.schemas.canonical import canonical_bytes
from shardwright.schemas.cost import CostReport
from shardwright.schemas.strategy import ParallelStrategy

SAFETY_FRACTION = 0.95
"""Plans are chosen within this share of the budget while any stays within it."""

Price = Callable[[ParallelStrategy], CostReport]
RankKey = tuple[int, float, float, bytes]


@dataclass(frozen=True)
class Priced:
    """A strategy and what it costs."""

    strategy: ParallelStrategy
    cost: CostReport

    @property
    def within_margin(self) -> bool:
        return self.cost.memory.fraction <= SAFETY_FRACTION

    @property
    def rank_key(self) -> RankKey:
        """Smaller is better; never equal for two strategies.

        Within the margin: step time, then memory. Beyond it: memory, then step time. Last, the
        strategy's canonical bytes.
        """
        memory, step = float(self.cost.memory.reserved_bytes), self.cost.time.step_ms
        name = canonical_bytes(self.strategy, floats=False)
        if self.within_margin:
            return (0, step, memory, name)
        return (1 if self.cost.feasible else 2, memory, step, name)


@dataclass(frozen=True)
class Scan:
    """All priced strategies, best first."""

    ranked: tuple[Priced, ...]

    @property
    def best(self) -> Priced:
        return self.ranked[0]

    @property
    def feasible(self) -> tuple[Priced, ...]:
        return tuple(plan for plan in self.ranked if plan.cost.feasible)

    def cost_of(self, strategy: ParallelStrategy) -> CostReport:
        """The report of a strategy of the scan."""
        return next(plan.cost for plan in self.ranked if plan.strategy == strategy)


def scan(strategies: tuple[ParallelStrategy, ...], price: Price) -> Scan:
    """Price every strategy.

    Args:
        strategies: at least one.
        price: cost of one strategy.
    """
    plans = [Priced(strategy, price(strategy)) for strategy in strategies]
    return Scan(tuple(sorted(plans, key=lambda plan: plan.rank_key)))
