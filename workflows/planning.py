"""From checked parts to a sealed plan. Pure: no clock, no host, no file."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright import __version__
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cluster import ClusterRef, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.errors import InfeasibleError, LegalityError
from shardwright.schemas.fusion import FusionDecision, FusionProposal
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
    PlainCost,
    Provenance,
    RemoteCode,
    SearchRecord,
)
from shardwright.schemas.profile import CheckpointProfile, WeightsPin
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.schemas.words import plural
from shardwright.workflows.environment import tool_versions, worker_environment
from shardwright.workflows.evidence import believed
from shardwright.workflows.report.units import duration, size
from shardwright.workflows.stages import Stages


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


@dataclass(frozen=True)
class Joined:
    """A strategy with its fusions re-certified for its mesh and its cost counted once more."""

    strategy: ParallelStrategy
    proposals: tuple[FusionProposal, ...]
    fusions: tuple[FusionDecision, ...]
    cost: CostReport
    eager: CostReport
    """The same without fused operators; the same report where there are none."""
    undecided: CostReport | None = None
    """Where it does not fit and a reviewer decided on fusions: the cost without these decisions."""

    @property
    def fused(self) -> int:
        """How many operators are installed."""
        return sum(fusion.provider != "eager" for fusion in self.fusions)

    @property
    def plain(self) -> PlainCost | None:
        """Figures without fused operators, where there are any."""
        if not self.fused:
            return None
        return PlainCost(step_ms=self.eager.time.step_ms, reserved_bytes=self.eager.memory.reserved_bytes)


def fitting(joined: Joined) -> Joined:
    """What was certified, where its memory fits.

    Raises:
        InfeasibleError: as ``does_not_fit``.
    """
    if not joined.cost.feasible:
        raise does_not_fit(joined)
    return joined


def does_not_fit(joined: Joined) -> InfeasibleError:
    """``out-of-memory``, with the fullest component; ``fusion-needed`` where it fits but for a reviewer's decisions."""
    memory = joined.cost.memory
    if joined.undecided is not None and joined.undecided.feasible:
        off = [fusion.proposal_id for fusion in joined.fusions if fusion.rejected]
        return InfeasibleError(
            "fusion-needed",
            f"this strategy fits only with its fusions: as decided it needs {size(memory.reserved_bytes)} a rank "
            f"and {size(memory.budget_bytes)} are usable, with all of them "
            f"{size(joined.undecided.memory.reserved_bytes)}" + (f"; turned off: {', '.join(off)}" if off else ""),
            where=joined.strategy.text(),
            next_action="keep the fusion, or first edit the strategy to one that fits without it: more sharding, "
            "a smaller micro-batch or full checkpointing",
        )
    fullest = max(memory.components, key=lambda c: c.bytes)
    return InfeasibleError(
        "out-of-memory",
        f"{memory.reserved_bytes:,} bytes are needed at {memory.peak_moment}, "
        f"the budget is {memory.budget_bytes:,}; largest: {fullest.name} with {fullest.bytes:,}",
        where=joined.strategy.text(),
        next_action="choose more sharding, a smaller micro-batch or full checkpointing",
    )


def certify(
    stages: Stages,
    profile: CheckpointProfile,
    recipe: Recipe,
    cluster: ClusterSpec,
    targets: tuple[LoraTarget, ...],
    proposals: tuple[FusionProposal, ...],
    strategy: ParallelStrategy,
    rejected: dict[str, str] | None = None,
    chosen: dict[str, str] | None = None,
) -> Joined:
    """Check legality, re-certify the proposals for the mesh, and re-cost, whether the strategy fits or not.

    Args:
        rejected: proposal id → reason, for fusions that a reviewer has turned down.
        chosen: proposal id → variant, where a reviewer chose how a region runs.

    Raises:
        LegalityError: ``illegal-strategy``, with every rule broken and the nearest legal value;
            ``variant-does-not-apply`` where a chosen variant cannot run on this mesh.
    """
    if broken := stages.violations(profile, recipe, cluster, strategy):
        raise LegalityError(
            "illegal-strategy",
            "; ".join(broken),
            where=strategy.text(),
            next_action="choose the nearest legal value named above",
        )
    certified, decisions = _recertify(stages, proposals, strategy, cluster, recipe, chosen or {})
    fusions = tuple(
        reject(d, (rejected or {})[d.proposal_id]) if d.proposal_id in (rejected or {}) else d for d in decisions
    )
    cost = stages.estimate(profile, recipe, cluster, strategy, targets, fusions)
    fused = any(fusion.provider != "eager" for fusion in fusions)
    eager = stages.estimate(profile, recipe, cluster, strategy, targets, ()) if fused else cost
    undecided = None
    if not cost.feasible and (rejected or chosen):
        own = _recertify(stages, proposals, strategy, cluster, recipe, {})[1]
        undecided = stages.estimate(profile, recipe, cluster, strategy, targets, own)
    return Joined(strategy, certified, fusions, cost, eager, undecided)


def _recertify(
    stages: Stages,
    proposals: tuple[FusionProposal, ...],
    strategy: ParallelStrategy,
    cluster: ClusterSpec,
    recipe: Recipe,
    chosen: dict[str, str],
) -> tuple[tuple[FusionProposal, ...], tuple[FusionDecision, ...]]:
    """Re-certify with every other variant of a chosen proposal out of reach; evidence keeps all variants."""
    narrowed = tuple(_only(p, chosen[p.id]) if p.id in chosen else p for p in proposals)
    certified, decisions = stages.recertify(narrowed, strategy, cluster, recipe)
    found = {decision.proposal_id: decision.variant for decision in decisions}
    for name, variant in chosen.items():
        if found.get(name) != variant:
            raise LegalityError(
                "variant-does-not-apply",
                f"{variant!r} cannot run {name} here: "
                + (f"{found[name]!r} would run in its place" if name in found else "its certificate refuses"),
                where=strategy.text(),
                next_action="choose another variant, or reject the fusion",
            )
    whole = {proposal.id: proposal.variants for proposal in proposals}
    return tuple(p.model_copy(update={"variants": whole[p.id]}) for p in certified), decisions


def _only(proposal: FusionProposal, variant: str) -> FusionProposal:
    kept = [
        v if v.name == variant else v.model_copy(update={"available": False, "unavailable_because": "not chosen"})
        for v in proposal.variants
    ]
    chosen = variant if proposal.chosen is not None else None
    return proposal.model_copy(update={"variants": tuple(kept), "chosen": chosen})


def reject(decision: FusionDecision, reason: str) -> FusionDecision:
    """The same region, run eagerly because a reviewer said so."""
    return decision.model_copy(
        update={
            "rejected": True,
            "reason": reason,
            "provider": "eager",
            "variant": "eager",
            "op": "-",
            "source_sha256": None,
            "beside": {},
        }
    )


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
