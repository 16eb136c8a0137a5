"""The Optuna study: an auditable search beside the exhaustive scan, saved to a journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import optuna
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from shardwright.agents.strategy.oracle import SAFETY_FRACTION, Price
from shardwright.schemas.canonical import sha256_of
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.space import suggest_in

SAMPLER = "TPESampler(multivariate=True, group=False, constant_liar=False, n_startup_trials=10, n_ei_candidates=24)"

SEED_STRIDE = 1_000_003
"""Trial n draws with ``seed · SEED_STRIDE + n``: an interrupted study goes on exactly as it would have."""


@dataclass(frozen=True)
class StudyOutcome:
    """What the study found by itself."""

    name: str
    trials: int
    best_step_ms: float | None
    """``None`` where no trial stayed within memory."""


def sampler(seed: int, number: int) -> TPESampler:
    """The named sampler, seeded for one trial."""
    return TPESampler(
        multivariate=True,
        group=False,
        constant_liar=False,
        n_startup_trials=10,
        n_ei_candidates=24,
        seed=(seed * SEED_STRIDE + number) % 2**32,
    )


def run_study(context: SearchContext, price: Price, *, key: str, trials: int, seed: int, journal: Path) -> StudyOutcome:
    """Minimise step time under the memory constraint.

    Every draw is legal by construction. Memory is a constraint (its excess over the safety share of
    the budget), never a penalty on time.

    Args:
        key: hash of everything the prices depend on; another key is another study in the journal.
        trials: complete trials in the journal afterwards; earlier ones of the same study count.
        journal: file that optuna-dashboard opens.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal.parent.mkdir(parents=True, exist_ok=True)
    name = f"strategy-{sha256_of([key, seed, SAMPLER, optuna.__version__])[:16]}"
    backend = JournalFileBackend(str(journal), lock_obj=JournalFileOpenLock(str(journal), grace_period=5))
    study = optuna.create_study(
        study_name=name, storage=JournalStorage(backend), direction="minimize", load_if_exists=True
    )
    done = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    if done == 0:
        for attribute, value in _attributes(key, seed).items():
            study.set_user_attr(attribute, value)
    for number in range(done, trials):
        study.sampler = sampler(seed, number)
        trial = study.ask()
        strategy = suggest_in(trial, context)
        cost = price(strategy)
        budget = cost.memory.budget_bytes
        trial.set_constraint("memory_excess", (cost.memory.reserved_bytes - SAFETY_FRACTION * budget) / budget)
        trial.set_user_attr("strategy", strategy.text())
        study.tell(trial, cost.time.step_ms)
    return _outcome(study, name)


def _attributes(key: str, seed: int) -> dict[str, str | int]:
    return {"inputs_sha256": key, "seed": seed, "sampler": SAMPLER, "optuna": optuna.__version__}


def _outcome(study: optuna.Study, name: str) -> StudyOutcome:
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    within = [t.value for t in complete if t.value is not None and all(v <= 0 for v in t.constraints.values())]
    return StudyOutcome(name=name, trials=len(complete), best_step_ms=min(within, default=None))
