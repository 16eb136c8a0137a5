"""The Optuna study: an auditable search over the joint space, saved to a journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from shardwright.agents.strategy.pricing import SAFETY_FRACTION
from shardwright.agents.strategy.proposals import Proposals
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cost import CostReport
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.space import parameters_of, suggest_in

SAMPLER = (
    "TPESampler(multivariate=False, group=False, constant_liar=False, n_startup_trials=20, n_ei_candidates=24) "
    "and, every second trial after 40, the most promising plan that walks from the best ones see"
)

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
    journal: Path | None,
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
        journal: file that optuna-dashboard opens; without one the trials are kept in memory.
        complete: chooses recomputed layers for a drawn plan; without it they are drawn, too.
        start: plans that the first trials repeat, each once.
        time_budget_s: no trial begins later than this; then the outcome depends on the machine's speed.
        progress: told (trials done, trials wanted).
    """
    default = ("checkpointing",) if complete else ()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    start = tuple(dict(zip(map(str, start), start, strict=True)).values())
    begun = [strategy.model_dump(mode="json") for strategy in start]
    name = f"strategy-{sha256_of([key, seed, SAMPLER, optuna.__version__, begun, list(default)])[:16]}"
    study = optuna.create_study(study_name=name, storage=_storage(journal), direction="minimize", load_if_exists=True)
    done = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    if done == 0:
        for attribute, value in _attributes(key, seed).items():
            study.set_user_attr(attribute, value)
    deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
    proposals = Proposals(context, study, start, default)
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


def cached(price: Price) -> Price:
    """Prices by strategy, each computed once: a study repeats itself."""
    known: dict[str, CostReport] = {}

    def priced(strategy: ParallelStrategy) -> CostReport:
        name = strategy.model_dump_json()
        if name not in known:
            known[name] = price(strategy)
        return known[name]

    return priced


def _storage(journal: Path | None) -> BaseStorage:
    if journal is None:
        return InMemoryStorage()
    journal.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal), grace_period=5)))


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
