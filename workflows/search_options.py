"""How a plan's search goes beyond its defaults: calibration, measured loads, exploring, a time budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.errors import RunError, UsageError
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.run import RunRecord
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.schemas.validation import explain
from shardwright.workflows.request import Request, SearchRequest
from shardwright.workflows.stage_results import Decisions, told
from shardwright.workflows.stages import Stages

Loads = tuple[tuple[float, ...], ...]
MILLION = 1_000_000


@dataclass(frozen=True)
class SearchOptions:
    """What the search uses beside checkpoint, cluster and recipe."""

    calibration: Calibration | None = None
    loads: Loads = ()
    explore: bool = False
    time_budget_s: float | None = None

    @property
    def default(self) -> bool:
        return self == SearchOptions()


def search_request(
    calibration: Path | None, load_profile: Path | None, explore: bool = False, time_budget_s: float | None = None
) -> SearchRequest | None:
    """The command line's values, files pinned by hash; ``None`` where nothing was given.

    Raises:
        ClusterError: the calibration is unreadable or wrong.
        UsageError: ``missing``: no such file; ``no-loads``: the run has recorded no expert loads.
    """
    if calibration is None and load_profile is None and not explore and time_budget_s is None:
        return None
    for option, path in (("--calibration", calibration), ("--load-profile", load_profile)):
        if path is not None and not path.exists():
            raise UsageError("missing", "no such file", where=str(path), next_action=f"name another with {option}")
    loads = None if load_profile is None else record_file(load_profile)
    asked = SearchRequest(
        calibration="" if calibration is None else str(calibration.resolve()),
        calibration_sha256=None if calibration is None or not calibration.is_file() else sha256_file(calibration),
        load_profile="" if loads is None else str(loads.resolve()),
        load_profile_sha256=None if loads is None or not loads.is_file() else sha256_file(loads),
        explore=explore,
        time_budget_s=time_budget_s,
    )
    options_of(asked)
    return asked


def options_of(asked: SearchRequest | None) -> SearchOptions:
    """Read what a request names.

    Raises:
        ClusterError, UsageError: as :func:`search_request`.
        RunError: ``changed-input``: a file is not the one that the run began with.
    """
    from shardwright.search_spaces.calibration import load_calibration

    if asked is None:
        return SearchOptions()
    curves = load_calibration(Path(asked.calibration)) if asked.calibration else None
    shares = expert_shares(Path(asked.load_profile)) if asked.load_profile else ()
    for path, wanted in (
        (asked.calibration, asked.calibration_sha256),
        (asked.load_profile, asked.load_profile_sha256),
    ):
        if path and sha256_file(Path(path)) != wanted:
            raise RunError(
                "changed-input",
                "the file is not the one that this run began with",
                where=path,
                next_action="restore it, or start a new run with the file as it is now",
            )
    return SearchOptions(curves, shares, asked.explore, asked.time_budget_s)


def stages_for(request: Request) -> Stages:
    """The work that a request asks for."""
    return stages_with(options_of(request.search))


def record_file(run_dir: Path) -> Path:
    """A run's record, given its folder or the file itself."""
    return run_dir / "run.json" if run_dir.is_dir() else run_dir


def expert_shares(run_dir: Path) -> Loads:
    """Share of rows by MoE layer and expert, from a run's record; layers in the model's order, idle ones even.

    Raises:
        UsageError: ``no-loads``, where there is no record, it is damaged, or it holds no loads.
    """
    path = record_file(run_dir)
    try:
        record = RunRecord.model_validate_json(path.read_bytes()) if path.is_file() else None
    except ValidationError as error:
        raise UsageError(
            "no-loads", f"not a run record: {explain(error)}", where=str(path), next_action="name the folder of a run"
        ) from error
    found = sorted(record.expert_loads, key=lambda one: _by_number(one.layer)) if record else []
    layers = [layer.tokens if sum(layer.tokens) else (1,) * len(layer.tokens) for layer in found]
    if not any(sum(layer.tokens) for layer in found):
        raise UsageError(
            "no-loads",
            "no expert loads are recorded there" if record else "no run record is there",
            where=str(path),
            next_action="name the folder of a run that has trained a model with experts",
        )
    return tuple(tuple(count / sum(tokens) for count in tokens) for tokens in layers)


def _by_number(layer: str) -> list[tuple[int, str]]:
    """A key by which ``layers.2`` comes before ``layers.10``: a run that was resumed lists them by letters."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in layer.split(".")]


def stages_with(options: SearchOptions) -> Stages:
    """The usual work, with the search, its rules and its prices as the options say."""
    if options.default:
        return Stages()

    usual, asked = Stages(), {"calibration": options.calibration, "explore": options.explore, "loads": options.loads}

    def violations(
        profile: CheckpointProfile, recipe: Recipe, cluster: ClusterSpec, strategy: ParallelStrategy
    ) -> tuple[str, ...]:
        from shardwright.search_spaces.context import SearchContext
        from shardwright.search_spaces.legality import violations_in

        found = violations_in(SearchContext(profile, recipe, cluster, options.explore, options.loads), strategy)
        return tuple(map(told, found))

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

    def place(strategy: ParallelStrategy) -> ParallelStrategy:
        from shardwright.search_spaces.placement import with_places

        return with_places(strategy, options.loads)

    placing = place if options.loads else None
    return replace(
        usual,
        search=partial(usual.search, **asked, time_budget_s=options.time_budget_s),
        search_fused=partial(usual.search_fused, **asked),
        advise=partial(usual.advise, calibration=options.calibration, loads=options.loads),
        violations=violations,
        estimate=estimate,
        place=placing,
    )


def with_loads(plan: AdaptationPlan, loads: Loads) -> AdaptationPlan:
    """The plan with the loads that it was made by, so that an edit of it can place experts anywhere."""
    if not loads:
        return plan
    lines = tuple(",".join(str(round(share * MILLION)) for share in shares) for shares in loads)
    return AdaptationPlan.seal(plan.decision, plan.evidence.model_copy(update={"expert_loads": lines}))


def loads_of(plan: AdaptationPlan) -> Loads:
    """The loads that a plan was made by; empty where it was made without."""
    layers = [[int(share) for share in line.split(",")] for line in plan.evidence.expert_loads]
    return tuple(tuple(share / max(sum(layer), 1) for share in layer) for layer in layers)


def with_calibration(plan: AdaptationPlan, calibration: Calibration | None) -> AdaptationPlan:
    """The plan naming its calibration by hash."""
    if calibration is None:
        return plan
    from shardwright.search_spaces.calibration import calibration_digest

    provenance = plan.evidence.provenance.model_copy(update={"calibration_digest": calibration_digest(calibration)})
    return AdaptationPlan.seal(plan.decision, plan.evidence.model_copy(update={"provenance": provenance}))
