"""The work behind the nodes, as a table of callables. Defaults import their room when they are first called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwright.schemas.advice import LlmAdvice
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cluster import ClusterRef, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.fusion import FusionDecision, FusionProposal
from shardwright.schemas.graph import OpGraph
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import AdaptationPlan, Alternative, SearchRecord
from shardwright.schemas.profile import CheckpointProfile, WeightsPin
from shardwright.schemas.recipe import BalanceSpec, DataSpec, LoraSpec, Recipe
from shardwright.schemas.run import AdapterFacts, CheckResult
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.workflows.request import LlmRequest


class StructureResult(Protocol):
    """What structure parsing returns."""

    @property
    def graph(self) -> OpGraph: ...
    @property
    def proposals(self) -> tuple[FusionProposal, ...]: ...


class SearchResult(Protocol):
    """What strategy search returns."""

    @property
    def best(self) -> ParallelStrategy: ...
    @property
    def cost(self) -> CostReport: ...
    @property
    def alternatives(self) -> tuple[Alternative, ...]: ...
    @property
    def record(self) -> SearchRecord: ...
    @property
    def explanation(self) -> tuple[str, ...]: ...


class FusedSearch(Protocol):
    """What the search finds when strategies are priced with their fused operators."""

    @property
    def strategies(self) -> tuple[ParallelStrategy, ...]: ...
    @property
    def feasible(self) -> int: ...


class Reranked(Protocol):
    """What ranking by the cost as run returns."""

    @property
    def chosen(self) -> int: ...
    @property
    def alternatives(self) -> tuple[Alternative, ...]: ...
    @property
    def explanation(self) -> tuple[str, ...]: ...


class Violation(Protocol):
    """A broken rule of legality."""

    @property
    def rule(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def nearest_legal(self) -> tuple[str, ...]: ...


Proposals = tuple[FusionProposal, ...]
Decisions = tuple[FusionDecision, ...]


def _load_cluster(name_or_path: str) -> ClusterSpec:
    from shardwright.search_spaces.catalogue import load_cluster

    return load_cluster(name_or_path)


def _cluster_ref(cluster: ClusterSpec) -> ClusterRef:
    from shardwright.search_spaces.catalogue import cluster_ref

    return cluster_ref(cluster)


def _profile(folder: Path) -> CheckpointProfile:
    from shardwright.checkpoints.profile import profile_checkpoint

    return profile_checkpoint(folder)


def _weights(folder: Path) -> WeightsPin:
    from shardwright.checkpoints.sampled import weights_pin

    return weights_pin(folder)


def _targets(folder: Path, lora: LoraSpec) -> tuple[LoraTarget, ...]:
    from shardwright.checkpoints.config import read_config
    from shardwright.checkpoints.targets import parameter_shapes, resolve_targets

    return resolve_targets(parameter_shapes(folder), lora, model_type=read_config(folder).text_model_type)


def _balance(folder: Path, balance: BalanceSpec) -> None:
    from shardwright.checkpoints.router_bias import check_balance

    check_balance(folder, balance)


def _documents(folder: Path, data: DataSpec) -> None:
    from shardwright.checkpoints.documents import check_documents

    check_documents(folder, data)


def _structure(
    folder: Path, profile: CheckpointProfile, cluster: ClusterSpec, recipe: Recipe, evidence: tuple[Path, ...] = ()
) -> StructureResult:
    from shardwright.agents.structure.run import run_structure

    return run_structure(folder, profile, cluster, recipe, evidence)


def _search(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    targets: tuple[LoraTarget, ...],
    trials: int,
    journal: Path,
    **more: Any,
) -> SearchResult:
    from shardwright.agents.strategy.run import run_search

    seed = recipe.seeds.search
    return run_search(
        profile, recipe, cluster, targets, trials=trials, seed=seed, journal=journal, may_fuse=True, **more
    )


def _search_fused(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    targets: tuple[LoraTarget, ...],
    certified: Callable[[ParallelStrategy], Decisions],
    found: ParallelStrategy,
    **more: Any,
) -> FusedSearch | None:
    from shardwright.agents.strategy.as_run import search_fused

    return search_fused(profile, recipe, cluster, targets, certified, found, **more)


def _advise(
    folder: Path,
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    targets: tuple[LoraTarget, ...],
    asked: LlmRequest,
    recording: Path,
    evidence: tuple[Path, ...] = (),
    **prices: Any,
) -> LlmAdvice:
    from shardwright.agents.llm.consult import consult
    from shardwright.workflows.advising import wire_for

    wire = wire_for(asked)
    return consult(
        folder,
        profile,
        recipe,
        cluster,
        targets,
        mode=asked.mode,
        endpoint=asked.endpoint,
        wire=wire,
        recording=recording,
        evidence=evidence,
        **prices,
    )


def _recertify(
    proposals: Proposals, strategy: ParallelStrategy, cluster: ClusterSpec, recipe: Recipe
) -> tuple[Proposals, Decisions]:
    from shardwright.agents.structure.join import recertify

    return recertify(proposals, strategy, cluster, recipe)


def _violations(
    profile: CheckpointProfile, recipe: Recipe, cluster: ClusterSpec, strategy: ParallelStrategy
) -> tuple[str, ...]:
    from shardwright.search_spaces.legality import violations

    return tuple(map(told, violations(profile, recipe, cluster, strategy)))


def told(violation: Violation) -> str:
    """A broken rule in words."""
    return f"{violation.rule}: {violation.message} (nearest legal: {', '.join(violation.nearest_legal) or 'none'})"


def _estimate(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    strategy: ParallelStrategy,
    targets: tuple[LoraTarget, ...],
    fusions: Decisions,
) -> CostReport:
    from shardwright.search_spaces.cost import estimate

    return estimate(profile, recipe, cluster, strategy, targets, fusions)


def _rerank(
    plain: tuple[Alternative, ...], fused: tuple[CostReport, ...], record: SearchRecord, cluster: ClusterSpec
) -> Reranked:
    from shardwright.agents.strategy.rerank import rerank

    return rerank(plain, fused, record, cluster)


def _verify(plan: AdaptationPlan, checkpoint: Path, data_root: Path) -> None:
    from shardwright.runtime.verify import verify_plan_against_world

    verify_plan_against_world(plan, checkpoint, data_root)


def _launch(plan: Path, checkpoint: Path, data_root: Path, approvals: Path, run_dir: Path) -> int:
    from shardwright.runtime.launch.engines import launch

    return launch(plan, checkpoint, data_root, approvals, run_dir)


def _export(run_dir: Path, checkpoint: Path) -> AdapterFacts:
    from shardwright.runtime.export.peft import export_adapter

    return export_adapter(run_dir, checkpoint)


def _check_adapter(run_dir: Path, checkpoint: Path) -> tuple[CheckResult, ...]:
    from shardwright.runtime.checks.export import check_adapter

    return check_adapter(run_dir, checkpoint)


@dataclass(frozen=True)
class Stages:
    """One callable for each piece of work; tests replace single ones."""

    load_cluster: Callable[[str], ClusterSpec] = _load_cluster
    cluster_ref: Callable[[ClusterSpec], ClusterRef] = _cluster_ref
    profile: Callable[[Path], CheckpointProfile] = _profile
    weights: Callable[[Path], WeightsPin] = _weights
    targets: Callable[[Path, LoraSpec], tuple[LoraTarget, ...]] = _targets
    balance: Callable[[Path, BalanceSpec], None] = _balance
    documents: Callable[[Path, DataSpec], None] = _documents
    structure: Callable[..., StructureResult] = _structure
    """(checkpoint, profile, cluster, recipe), and where there are any the user's files of measured times."""
    search: Callable[..., SearchResult] = _search
    """(profile, recipe, cluster, targets, trials, journal); by name ``advised`` plans to start from, where there are
    any, and ``progress``, told (trials done, trials wanted)."""
    search_fused: Callable[..., FusedSearch | None] = _search_fused
    """(profile, recipe, cluster, targets, decisions of a strategy, the search's best): the search as strategies run;
    ``None`` where none may have a fused operator."""
    advise: Callable[..., LlmAdvice] = _advise
    """(folder, profile, recipe, cluster, targets, what was asked, recording), then the user's files of times."""
    recertify: Callable[[Proposals, ParallelStrategy, ClusterSpec, Recipe], tuple[Proposals, Decisions]] = _recertify
    violations: Callable[[CheckpointProfile, Recipe, ClusterSpec, ParallelStrategy], tuple[str, ...]] = _violations
    estimate: Callable[
        [CheckpointProfile, Recipe, ClusterSpec, ParallelStrategy, tuple[LoraTarget, ...], Decisions], CostReport
    ] = _estimate
    rerank: Callable[[tuple[Alternative, ...], tuple[CostReport, ...], SearchRecord, ClusterSpec], Reranked] = _rerank
    """Strategies without fused operators, the search's best first, and what each costs with its own."""
    place: Callable[[ParallelStrategy], ParallelStrategy] | None = None
    """Gives each layer's experts their places by measured loads; ``None`` where none were measured."""
    verify: Callable[[AdaptationPlan, Path, Path], None] = _verify
    launch: Callable[[Path, Path, Path, Path, Path], int] = _launch
    export: Callable[[Path, Path], AdapterFacts] = _export
    check_adapter: Callable[[Path, Path], tuple[CheckResult, ...]] = _check_adapter


def cluster_sha256(cluster: ClusterSpec) -> str:
    """The hash that a request pins its cluster by."""
    return sha256_of(cluster)
