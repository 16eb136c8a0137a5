"""How a plan's search goes beyond its defaults: calibration, measured loads, exploring, a time budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.errors import UsageError
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.run import RunRecord
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.workflows.stages import Decisions, SearchResult, Stages

Loads = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class SearchOptions:
    """What the search uses beside checkpoint, cluster and recipe."""

    calibration: Calibration | None = None
    loads: Loads = ()
    explore: bool = False
    time_budget_s: float | None = None

    @classmethod
    def read(
        cls, calibration: Path | None, load_profile: Path | None, explore: bool, time_budget_s: float | None
    ) -> SearchOptions:
        """From the command line's values.

        Raises:
            ClusterError: the calibration is unreadable or wrong.
            UsageError: ``no-loads``: the run has recorded no expert loads.
        """
        from shardwright.search_spaces.calibration import load_calibration

        curves = load_calibration(calibration) if calibration else None
        return cls(curves, expert_shares(load_profile) if load_profile else (), explore, time_budget_s)

    @property
    def default(self) -> bool:
        return self == SearchOptions()


def expert_shares(run_dir: Path) -> Loads:
    """Share of rows by MoE layer and expert, from a run's record.

    Raises:
        UsageError: ``no-loads``, where there is no record or it holds no loads.
    """
    path = run_dir / "run.json" if run_dir.is_dir() else run_dir
    record = RunRecord.model_validate_json(path.read_bytes()) if path.is_file() else None
    layers = [layer.tokens for layer in record.expert_loads if sum(layer.tokens)] if record else []
    if not layers:
        raise UsageError(
            "no-loads",
            "no expert loads are recorded there" if record else "no run record is there",
            where=str(path),
            next_action="name the folder of a run that has trained a model with experts",
        )
    return tuple(tuple(count / sum(tokens) for count in tokens) for tokens in layers)


def stages_with(options: SearchOptions) -> Stages:
    """The usual work, with the search, its rules and its prices as the options say."""
    if options.default:
        return Stages()

    def search(
        profile: CheckpointProfile,
        recipe: Recipe,
        cluster: ClusterSpec,
        targets: tuple[LoraTarget, ...],
        trials: int,
        journal: Path,
    ) -> SearchResult:
        from shardwright.agents.strategy.run import run_search

        return run_search(
            profile,
            recipe,
            cluster,
            targets,
            trials=trials,
            seed=recipe.seeds.search,
            journal=journal,
            calibration=options.calibration,
            explore=options.explore,
            loads=options.loads,
            time_budget_s=options.time_budget_s,
        )

    def violations(
        profile: CheckpointProfile, recipe: Recipe, cluster: ClusterSpec, strategy: ParallelStrategy
    ) -> tuple[str, ...]:
        from shardwright.search_spaces.context import SearchContext
        from shardwright.search_spaces.legality import violations_in

        found = violations_in(SearchContext(profile, recipe, cluster, options.explore, options.loads), strategy)
        return tuple(f"{v.rule}: {v.message}" for v in found)

    def estimate(
        profile: CheckpointProfile,
        recipe: Recipe,
        cluster: ClusterSpec,
        strategy: ParallelStrategy,
        targets: tuple[LoraTarget, ...],
        fusions: Decisions,
    ) -> CostReport:
        from shardwright.search_spaces.cost import estimate as priced

        return priced(profile, recipe, cluster, strategy, targets, fusions, options.calibration, options.loads)

    return replace(Stages(), search=search, violations=violations, estimate=estimate)


def with_calibration(plan: AdaptationPlan, calibration: Calibration | None) -> AdaptationPlan:
    """The plan naming its calibration by hash."""
    if calibration is None:
        return plan
    from shardwright.search_spaces.calibration import calibration_digest

    provenance = plan.evidence.provenance.model_copy(update={"calibration_digest": calibration_digest(calibration)})
    return AdaptationPlan.seal(plan.decision, plan.evidence.model_copy(update={"provenance": provenance}))
