"""Both agents of one run asked in turn, over the same capture and the same search space as the rules use."""

from __future__ import annotations

from pathlib import Path

from shardwright.agents.llm.advise import Session
from shardwright.agents.llm.strategy_advisor import StrategyAdvisor
from shardwright.agents.llm.structure_advisor import StructureAdvisor
from shardwright.agents.llm.wire import Wire
from shardwright.agents.strategy.pricing import Pricer
from shardwright.agents.structure.run import open_structure
from shardwright.schemas.advice import LlmAdvice
from shardwright.schemas.cluster import Calibration, ClusterSpec
from shardwright.schemas.llm import LlmEndpoint, LlmMode, Suggestion
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import workload


def consult(
    folder: Path,
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    targets: tuple[LoraTarget, ...],
    *,
    mode: LlmMode,
    endpoint: LlmEndpoint,
    wire: Wire,
    recording: Path,
    evidence: tuple[Path, ...] = (),
    calibration: Calibration | None = None,
    loads: tuple[tuple[float, ...], ...] = (),
) -> LlmAdvice:
    """Ask a server about fusions, then about plans.

    Args:
        wire: to the server, or a replay.
        recording: where every exchange is written.
        evidence: files of measured times, as ``run_structure`` takes them.
        calibration: of the cluster, where plans are priced with one.
        loads: share of rows by MoE layer and expert, where plans are priced with measured ones.

    Raises:
        LlmUnavailableError: ``unusable`` where a model is required and cannot be used.
    """
    session = Session(mode, endpoint, wire, recording)
    suggestions: list[Suggestion] = []
    if not session.open():
        return LlmAdvice(record=session.record(suggestions))
    opened = open_structure(folder, profile, cluster, recipe, evidence)
    structure = StructureAdvisor(opened.pairs, opened.matches, opened.facts, opened.target)
    session.consult("fusions", structure)
    pricer = Pricer.of(workload(profile, recipe, targets, loads), cluster, (), calibration)
    strategy = StrategyAdvisor(SearchContext(profile, recipe, cluster, False, loads), pricer)
    session.consult("plans", strategy)
    suggestions = [*structure.advice.suggestions, *strategy.advice.suggestions]
    return LlmAdvice(
        proposals=tuple(structure.advice.proposals),
        starts=tuple(strategy.advice.starts),
        record=session.record(suggestions),
    )
