"""A strategy with its fusions: legal, re-certified for its mesh, its cost counted, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.errors import InfeasibleError, LegalityError
from shardwright.schemas.fusion import FusionDecision, FusionProposal
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.plan import PlainCost
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.workflows.report.units import size
from shardwright.workflows.stages import Stages


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
