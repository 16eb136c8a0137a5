"""The Optuna study: an auditable search over the joint space, saved to a journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from shardwright.agents.strategy.neighbours import Promise, neighbours
from shardwright.agents.strategy.pricing import SAFETY_FRACTION
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cost import CostReport
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes import AXES
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.executable import Value
from shardwright.search_spaces.space import parameters_of, suggest_in

SAMPLER = (
    "TPESampler(multivariate=False, group=False, constant_liar=False, n_startup_trials=20, n_ei_candidates=24) "
    "and, every second trial after 40, the most promising unseen neighbour of the best"
)

FREE_TRIALS = 40
"""Trials that the sampler draws alone, after those that repeat given plans."""

SEED_STRIDE = 1_000_003
"""Trial n draws with ``seed · SEED_STRIDE + n``: an interrupted study goes on exactly as it would have."""

Price = Callable[[ParallelStrategy], CostReport]
Complete = Callable[[ParallelStrategy], ParallelStrategy]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StudyOutcome:
    """What the study found."""

    name: str
    trials: int
    best_step_ms: float | None
    """``None`` where no trial stayed within memory."""
    best: ParallelStrategy | None = None


def sampler(seed: int, number: int) -> TPESampler:
    """The named sampler, seeded for one trial.

    Independent: ranges follow earlier draws, and an axis with a moving range would fall out of a joint model.
    """
    return TPESampler(
        multivariate=False,
        group=False,
        constant_liar=False,
        n_startup_trials=20,
        n_ei_candidates=24,
        seed=(seed * SEED_STRIDE + number) % 2**32,
    )


def run_study(
    context: SearchContext,
    price: Price,
    *,
    key: str,
    trials: int,
    seed: int,
    journal: Path,
    complete: Complete | None = None,
    start: Sequence[ParallelStrategy] = (),
    time_budget_s: float | None = None,
    progress: Progress | None = None,
) -> StudyOutcome:
    """Minimise step time under the memory constraint.

    Every draw is legal by construction. Memory is a constraint (its excess over the safety share of
    the budget), never a penalty on time.

    Args:
        key: hash of everything the prices depend on; another key is another study in the journal.
        trials: complete trials in the journal afterwards; earlier ones of the same study count.
        journal: file that optuna-dashboard opens.
        complete: chooses recomputed layers for a drawn plan; without it they are drawn, too.
        start: plans that the first trials repeat.
        time_budget_s: no trial begins later than this; then the outcome depends on the machine's speed.
        progress: told (trials done, trials wanted).
    """
    default = ("checkpointing",) if complete else ()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal.parent.mkdir(parents=True, exist_ok=True)
    begun = [strategy.model_dump(mode="json") for strategy in start]
    name = f"strategy-{sha256_of([key, seed, SAMPLER, optuna.__version__, begun, list(default)])[:16]}"
    backend = JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal), grace_period=5))
    study = optuna.create_study(
        study_name=name, storage=JournalStorage(backend), direction="minimize", load_if_exists=True
    )
    done = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    if done == 0:
        for attribute, value in _attributes(key, seed).items():
            study.set_user_attr(attribute, value)
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    proposals = Proposals(context, study, tuple(start), default)
    for number in range(done, trials):
        if deadline is not None and time.monotonic() > deadline:
            break
        study.sampler = sampler(seed, number)
        proposed = proposals.next(number)
        if proposed is not None:
            study.enqueue_trial(parameters_of(context, proposed, default))
        trial = study.ask()
        drawn = suggest_in(trial, context, default)
        strategy = complete(drawn) if complete else drawn
        cost = price(strategy)
        budget = cost.memory.budget_bytes
        excess = (cost.memory.reserved_bytes - SAFETY_FRACTION * budget) / budget
        trial.set_constraint("memory_excess", excess)
        trial.set_user_attr("drawn", drawn.model_dump(mode="json"))
        trial.set_user_attr("strategy", strategy.model_dump(mode="json"))
        trial.set_user_attr("label", strategy.text())
        study.tell(trial, cost.time.step_ms)
        if progress:
            progress(number + 1, trials)
    return _outcome(study, name)


class Proposals:
    """Which trials repeat a given plan instead of asking the sampler.

    The first repeat ``start``. After ``FREE_TRIALS`` every second one takes the next neighbour of the best plan so far
    that no trial has drawn; where there is none left the sampler draws again. All of it follows from the trials in the
    journal, so an interrupted study goes on alike.
    """

    def __init__(
        self, context: SearchContext, study: optuna.Study, start: tuple[ParallelStrategy, ...], default: tuple[str, ...]
    ) -> None:
        self.context, self.study, self.start, self.default = context, study, start, default
        self.drawn: dict[int, ParallelStrategy] = {}

    def next(self, number: int) -> ParallelStrategy | None:
        if number < len(self.start):
            return self.start[number]
        if number < len(self.start) + FREE_TRIALS or number % 2:
            return None
        complete = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        for trial in complete:
            if trial.number not in self.drawn:
                self.drawn[trial.number] = ParallelStrategy.model_validate(trial.user_attrs["drawn"])
        ranked = _ranked(complete)
        if not ranked:
            return None
        seen = set(map(_name, self.drawn.values()))
        around = neighbours(self.context, self.drawn[ranked[0].number], self.default, self._promise(ranked))
        return next((plan for plan in around if _name(plan) not in seen), None)

    def _promise(self, ranked: Sequence[optuna.trial.FrozenTrial]) -> Promise:
        """Step time of the best trial with a value; 0 for one that was never tried, infinite if it never fitted."""
        known: dict[tuple[str, Value], float] = dict.fromkeys(
            ((axis.name, axis.read(plan)) for plan in self.drawn.values() for axis in AXES), float("inf")
        )
        for trial in reversed(ranked):
            for axis in AXES:
                known[axis.name, axis.read(self.drawn[trial.number])] = trial.value or 0.0
        return lambda axis, value: known.get((axis, value), 0.0)


def _name(plan: ParallelStrategy) -> str:
    return plan.model_dump_json()


def _attributes(key: str, seed: int) -> dict[str, str | int]:
    return {"inputs_sha256": key, "seed": seed, "sampler": SAMPLER, "optuna": optuna.__version__}


def _ranked(complete: Sequence[optuna.trial.FrozenTrial]) -> list[optuna.trial.FrozenTrial]:
    """Trials within memory, fastest first, the earliest of equals."""
    within = [t for t in complete if t.value is not None and all(v <= 0 for v in t.constraints.values())]
    return sorted(within, key=lambda t: (t.value, t.number))


def _outcome(study: optuna.Study, name: str) -> StudyOutcome:
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    winner = next(iter(_ranked(complete)), None)
    return StudyOutcome(
        name=name,
        trials=len(complete),
        best_step_ms=winner.value if winner else None,
        best=ParallelStrategy.model_validate(winner.user_attrs["strategy"]) if winner else None,
    )
