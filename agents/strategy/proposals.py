"""Which plans a study repeats, or tries beside its sampler's draws.

The best plan of a space is often several steps from a good one, and every plan between is slower or does not fit: a
mesh that needs less memory pays only with another micro-batch, offload or count of recomputed layers. So steps are
chained without being tried: from the best plans each walk goes where a model of all trials so far (``surrogate``)
promises most, and the most promising plan that any walk saw is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import optuna
from optuna.trial import TrialState

from shardwright.agents.strategy.neighbours import Change, Known, steps
from shardwright.agents.strategy.surrogate import Point, Surrogate
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes import AXES
from shardwright.search_spaces.axes.base import draws_of
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.space import strategy_from

FREE_TRIALS = 40
"""Trials that the sampler draws alone, after those that repeat given plans."""

WALKS = 3
"""Plans that walks begin at: the best of different meshes."""

LONGEST = 4
"""Steps of one walk."""


@dataclass(frozen=True)
class Around:
    """The plans one step from one, each once, as values by axis name and as points."""

    plans: tuple[Change, ...]
    points: tuple[Point, ...]


class Proposals:
    """Which trials repeat a given plan instead of asking the sampler.

    The first repeat ``start``. After ``FREE_TRIALS`` every second one takes the most promising plan of the walks; where
    they see none that was not drawn the sampler draws again. All of it follows from the trials in the journal, so an
    interrupted study goes on alike.
    """

    def __init__(
        self, context: SearchContext, study: optuna.Study, start: tuple[ParallelStrategy, ...], default: tuple[str, ...]
    ) -> None:
        self.context, self.study, self.start, self.default = context, study, start, default
        self.drawn: dict[int, ParallelStrategy] = {}
        self.known: dict[Point, Around] = {}
        self.legal: Known = {}

    def next(self, number: int) -> ParallelStrategy | None:
        if number < len(self.start):
            return self.start[number]
        if number < len(self.start) + FREE_TRIALS or number % 2:
            return None
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        for trial in complete:
            if trial.number not in self.drawn:
                self.drawn[trial.number] = ParallelStrategy.model_validate(trial.user_attrs["drawn"])
        return self._most_promising(complete)

    def _most_promising(self, complete: Sequence[optuna.trial.FrozenTrial]) -> ParallelStrategy | None:
        first = {point_of(draws_of(self.drawn[trial.number])): trial for trial in reversed(complete)}
        told = sorted(first.values(), key=lambda trial: trial.number)
        model = Surrogate.of(
            [point_of(draws_of(self.drawn[trial.number])) for trial in told],
            [trial.value or 0.0 for trial in told],
            [max(trial.constraints.values()) for trial in told],
        )
        best: tuple[float, Change] | None = None
        for draws in self._begun(complete):
            reached = float("-inf")
            for _ in range(LONGEST):
                around = self._around(draws)
                untried = [place for place, point in enumerate(around.points) if point not in first]
                if not untried:
                    break
                promises = model.promise([around.points[place] for place in untried])
                promise = max(promises)
                if promise <= reached:
                    break
                draws, reached = around.plans[untried[promises.index(promise)]], promise
                if best is None or promise > best[0]:
                    best = (promise, draws)
        return strategy_from(best[1]) if best else None

    def _begun(self, complete: Sequence[optuna.trial.FrozenTrial]) -> list[Change]:
        """Where walks begin: the best trials of different meshes, or the leanest where none fits."""
        plans: dict[str, Change] = {}
        for trial in sorted(complete, key=rank):
            plan = self.drawn[trial.number]
            plans.setdefault(plan.mesh.text(), draws_of(plan))
            if len(plans) == WALKS:
                break
        return list(plans.values())

    def _around(self, draws: Change) -> Around:
        point = point_of(draws)
        if point not in self.known:
            plans = {point_of(plan): plan for plan in steps(self.context, draws, self.default, self.legal)}
            plans.pop(point, None)
            self.known[point] = Around(tuple(plans.values()), tuple(plans))
        return self.known[point]


def point_of(draws: Change) -> Point:
    """One plan's value of each axis, and which layers are recomputed where that is drawn."""
    return tuple(draws[axis.name] for axis in AXES)


def rank(trial: optuna.trial.FrozenTrial) -> tuple[float, float, int]:
    """Within memory the fastest first, then by what is missing, the earliest of equals."""
    return max(0.0, *trial.constraints.values()), trial.value or 0.0, trial.number
