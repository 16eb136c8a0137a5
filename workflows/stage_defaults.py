"""The work behind the nodes as it is done by default; each import of a room waits for the first call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.schemas.advice import LlmAdvice
from shardwright.schemas.cluster import ClusterRef, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import AdaptationPlan, Alternative, SearchRecord
from shardwright.schemas.profile import CheckpointProfile, WeightsPin
from shardwright.schemas.recipe import BalanceSpec, DataSpec, LoraSpec, Recipe
from shardwright.schemas.run import AdapterFacts, CheckResult
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.workflows.request import LlmRequest
from shardwright.workflows.stage_results import (
    Decisions,
    FusedSearch,
    Proposals,
    Reranked,
    SearchResult,
    StructureResult,
    told,
)


def load_cluster(name_or_path: str) -> ClusterSpec:
    from shardwright.search_spaces.catalogue import load_cluster

    return load_cluster(name_or_path)


def cluster_ref(cluster: ClusterSpec) -> ClusterRef:
    from shardwright.search_spaces.catalogue import cluster_ref

    return cluster_ref(cluster)


def profile(folder: Path) -> CheckpointProfile:
    from shardwright.checkpoints.profile import profile_checkpoint

    return profile_checkpoint(folder)


def weights(folder: Path) -> WeightsPin:
    from shardwright.checkpoints.sampled import weights_pin

    return weights_pin(folder)


def targets(folder: Path, lora: LoraSpec) -> tuple[LoraTarget, ...]:
    from shardwright.checkpoints.config import read_config
    from shardwright.checkpoints.targets import parameter_shapes, resolve_targets

    return resolve_targets(parameter_shapes(folder), lora, model_type=read_config(folder).text_model_type)


def balance(folder: Path, balance: BalanceSpec) -> None:
    from shardwright.checkpoints.router_bias import check_balance

    check_balance(folder, balance)


def documents(folder: Path, data: DataSpec) -> None:
    from shardwright.checkpoints.documents import check_documents

    check_documents(folder, data)


def structure(
    folder: Path, profile: CheckpointProfile, cluster: ClusterSpec, recipe: Recipe, evidence: tuple[Path, ...] = ()
) -> StructureResult:
    from shardwright.agents.structure.run import run_structure

    return run_structure(folder, profile, cluster, recipe, evidence)


def search(
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


def search_fused(
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


def advise(
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


def recertify(
    proposals: Proposals, strategy: ParallelStrategy, cluster: ClusterSpec, recipe: Recipe
) -> tuple[Proposals, Decisions]:
    from shardwright.agents.structure.join import recertify

    return recertify(proposals, strategy, cluster, recipe)


def violations(
    profile: CheckpointProfile, recipe: Recipe, cluster: ClusterSpec, strategy: ParallelStrategy
) -> tuple[str, ...]:
    from shardwright.search_spaces.legality import violations

    return tuple(map(told, violations(profile, recipe, cluster, strategy)))


def estimate(
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    strategy: ParallelStrategy,
    targets: tuple[LoraTarget, ...],
    fusions: Decisions,
) -> CostReport:
    from shardwright.search_spaces.cost import estimate

    return estimate(profile, recipe, cluster, strategy, targets, fusions)


def rerank(
    plain: tuple[Alternative, ...], fused: tuple[CostReport, ...], record: SearchRecord, cluster: ClusterSpec
) -> Reranked:
    from shardwright.agents.strategy.rerank import rerank

    return rerank(plain, fused, record, cluster)


def verify(plan: AdaptationPlan, checkpoint: Path, data_root: Path) -> None:
    from shardwright.runtime.verify import verify_plan_against_world

    verify_plan_against_world(plan, checkpoint, data_root)


def launch(plan: Path, checkpoint: Path, data_root: Path, approvals: Path, run_dir: Path) -> int:
    from shardwright.runtime.launch.engines import launch

    return launch(plan, checkpoint, data_root, approvals, run_dir)


def export(run_dir: Path, checkpoint: Path) -> AdapterFacts:
    from shardwright.runtime.export.peft import export_adapter

    return export_adapter(run_dir, checkpoint)


def check_adapter(run_dir: Path, checkpoint: Path) -> tuple[CheckResult, ...]:
    from shardwright.runtime.checks.export import check_adapter

    return check_adapter(run_dir, checkpoint)
