"""The work behind the nodes, as a table of callables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwright.schemas.advice import LlmAdvice
from shardwright.schemas.cluster import ClusterRef, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import AdaptationPlan, Alternative, SearchRecord
from shardwright.schemas.profile import CheckpointProfile, WeightsPin
from shardwright.schemas.recipe import BalanceSpec, DataSpec, LoraSpec, Recipe
from shardwright.schemas.run import AdapterFacts, CheckResult
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.workflows import stage_defaults
from shardwright.workflows.stage_results import (
    Decisions,
    FusedSearch,
    Proposals,
    Reranked,
    SearchResult,
    StructureResult,
)


@dataclass(frozen=True)
class Stages:
    """One callable for each piece of work; tests replace single ones."""

    load_cluster: Callable[[str], ClusterSpec] = stage_defaults.load_cluster
    cluster_ref: Callable[[ClusterSpec], ClusterRef] = stage_defaults.cluster_ref
    profile: Callable[[Path], CheckpointProfile] = stage_defaults.profile
    weights: Callable[[Path], WeightsPin] = stage_defaults.weights
    targets: Callable[[Path, LoraSpec], tuple[LoraTarget, ...]] = stage_defaults.targets
    balance: Callable[[Path, BalanceSpec], None] = stage_defaults.balance
    documents: Callable[[Path, DataSpec], None] = stage_defaults.documents
    structure: Callable[..., StructureResult] = stage_defaults.structure
    """(checkpoint, profile, cluster, recipe), and where there are any the user's files of measured times."""
    search: Callable[..., SearchResult] = stage_defaults.search
    """(profile, recipe, cluster, targets, trials, journal); by name ``advised`` plans to start from, where there are
    any, and ``progress``, told (trials done, trials wanted)."""
    search_fused: Callable[..., FusedSearch | None] = stage_defaults.search_fused
    """(profile, recipe, cluster, targets, decisions of a strategy, the search's best): the search as strategies run;
    ``None`` where none may have a fused operator."""
    advise: Callable[..., LlmAdvice] = stage_defaults.advise
    """(folder, profile, recipe, cluster, targets, what was asked, recording), then the user's files of times."""
    recertify: Callable[[Proposals, ParallelStrategy, ClusterSpec, Recipe], tuple[Proposals, Decisions]] = (
        stage_defaults.recertify
    )
    violations: Callable[[CheckpointProfile, Recipe, ClusterSpec, ParallelStrategy], tuple[str, ...]] = (
        stage_defaults.violations
    )
    estimate: Callable[
        [CheckpointProfile, Recipe, ClusterSpec, ParallelStrategy, tuple[LoraTarget, ...], Decisions], CostReport
    ] = stage_defaults.estimate
    rerank: Callable[[tuple[Alternative, ...], tuple[CostReport, ...], SearchRecord, ClusterSpec], Reranked] = (
        stage_defaults.rerank
    )
    """Strategies without fused operators, the search's best first, and what each costs with its own."""
    place: Callable[[ParallelStrategy], ParallelStrategy] | None = None
    """Gives each layer's experts their places by measured loads; ``None`` where none were measured."""
    verify: Callable[[AdaptationPlan, Path, Path], None] = stage_defaults.verify
    launch: Callable[[Path, Path, Path, Path, Path], int] = stage_defaults.launch
    export: Callable[[Path, Path], AdapterFacts] = stage_defaults.export
    check_adapter: Callable[[Path, Path], tuple[CheckResult, ...]] = stage_defaults.check_adapter
