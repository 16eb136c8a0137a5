"""From checked parts to a sealed plan. Pure: no clock, no host, no file."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright import __version__
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cluster import ClusterRef, ClusterSpec
from shardwright.schemas.graph import OpGraph
from shardwright.schemas.llm import LlmRecord
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import (
    AdaptationPlan,
    Alternative,
    DataPin,
    Decision,
    Evidence,
    EvidenceFile,
    Provenance,
    RemoteCode,
    SearchRecord,
)
from shardwright.schemas.profile import CheckpointProfile, WeightsPin
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.words import plural
from shardwright.workflows.certifying import Joined
from shardwright.workflows.environment import tool_versions, worker_environment
from shardwright.workflows.evidence import believed
from shardwright.workflows.report.units import duration, size


@dataclass(frozen=True)
class Inputs:
    """What is known before a strategy is chosen."""

    profile: CheckpointProfile
    recipe: Recipe
    cluster: ClusterSpec
    cluster_ref: ClusterRef
    targets: tuple[LoraTarget, ...]
    data: DataPin
    graph: OpGraph
    weights: WeightsPin | None = None
    evidence: tuple[EvidenceFile, ...] = ()
    """The user's own measured times."""
    remote_code: RemoteCode | None = None


def assemble(
    inputs: Inputs,
    joined: Joined,
    alternatives: tuple[Alternative, ...],
    record: SearchRecord,
    explanation: tuple[str, ...],
    advice: LlmRecord | None = None,
) -> AdaptationPlan:
    """The sealed plan of a fresh search.

    Args:
        advice: a language model's part in it.
    """
    profile, recipe, cluster = inputs.profile, inputs.recipe, inputs.cluster
    decision = Decision(
        model_type=profile.model_type,
        architecture=profile.architecture,
        checkpoint=profile.fingerprint,
        weights=inputs.weights,
        data=inputs.data,
        recipe=recipe,
        cluster=inputs.cluster_ref,
        strategy=joined.strategy,
        lora_targets=inputs.targets,
        fusions=joined.fusions,
        environment=worker_environment(cluster),
        remote_code=inputs.remote_code,
    )
    evidence = Evidence(
        profile=profile,
        cluster=cluster,
        proposals=joined.proposals,
        cost=joined.cost,
        alternatives=alternatives,
        plain=joined.plain,
        search=record,
        provenance=Provenance(
            shardwright=__version__,
            versions=tool_versions(),
            cluster_digest=inputs.cluster_ref.digest,
            recipe_digest=sha256_of(recipe),
            evidence_files=inputs.evidence,
            graph_digest=sha256_of(inputs.graph),
            llm="off" if advice is None else advice.text(),
            llm_record=advice,
        ),
        explanation=(
            *_with_fusions(joined),
            *explanation,
            *believed(inputs.evidence, joined.proposals, cluster.device.name),
            *_pinned(inputs),
        ),
    )
    return AdaptationPlan.seal(decision, evidence)


def _pinned(inputs: Inputs) -> tuple[str, ...]:
    """How far the plan tells the weights' values; nothing for a run that began before values were pinned."""
    weights, stored = inputs.weights, inputs.profile.stored_bytes
    if weights is None:
        return ()
    if not weights.files:
        return ("The weights' values are not pinned: the plan was made from headers alone.",)
    part = "whole" if weights.read_bytes == stored else f"by {size(weights.read_bytes)} of {size(stored)}"
    return (f"The weights' values are pinned {part}, spread over {plural(len(weights.files), 'file')}.",)


def _with_fusions(joined: Joined) -> tuple[str, ...]:
    """Where kernels are installed, what the plan's own step is, and what it is without them."""
    if joined.plain is None:
        return ()
    step, memory = duration(joined.cost.time.step_ms), size(joined.cost.memory.reserved_bytes)
    over = joined.plain.reserved_bytes > joined.eager.memory.budget_bytes
    without, held = duration(joined.plain.step_ms), size(joined.plain.reserved_bytes)
    return (
        f"With the {plural(joined.fused, 'fused operator')} installed here a step takes {step} and a "
        f"rank reserves {memory}; without them {without} and {held}{', which does not fit' if over else ''}.",
    )
