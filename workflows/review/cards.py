"""The cards of the review page: one a fusion proposal, with what was decided about it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.schemas.fusion import FusionDecision, FusionProposal, Variant
from shardwright.workflows.report.plan_verdict import beyond_times, way
from shardwright.workflows.report.units import duration
from shardwright.workflows.review.decisions import Accepted
from shardwright.workflows.review.session import ReviewSession

INLINE_NODES = 600
"""Nodes of all subgraphs together up to which cards come whole; above, each card's body is fetched when opened."""


@dataclass(frozen=True)
class Card:
    """One fusion proposal."""

    index: int
    """Its place in the plan's proposals: the only name that addresses use."""
    proposal: FusionProposal
    decision: FusionDecision | None
    accepted: Accepted | None
    inline: bool = True
    by_person: bool = False
    """A reviewer rejected it, or chose how it runs."""

    @property
    def id(self) -> str:
        return self.proposal.id

    @property
    def variant(self) -> Variant | None:
        """The variant that would run, or the best that was thought of where none does."""
        wanted = self.decision.variant if self.decision is not None else self.proposal.chosen
        return next((v for v in self.proposal.variants if v.name == wanted), None)

    @property
    def state(self) -> str:
        """``accepted``, ``rejected``, ``undecided`` or ``none`` (not in the plan, nothing to decide)."""
        if self.decision is None:
            return "none"
        if self.decision.rejected:
            return "rejected"
        return "accepted" if self.accepted is not None else "undecided"

    @property
    def runs(self) -> str:
        """How the region runs, in a few words."""
        if self.decision is None:
            return "refused" if not self.proposal.certificate.legal else "not installed"
        if self.decision.rejected:
            return "eager (rejected)"
        provider = self.decision.provider
        return "eager, unchanged" if provider == "eager" else way(provider, self.decision.variant)

    @property
    def reason(self) -> str:
        """Why it runs so, beyond the times that stand beside it."""
        return beyond_times(self.proposal.reason)

    @property
    def fused(self) -> bool:
        return self.decision is not None and not self.decision.rejected and self.decision.provider != "eager"

    @property
    def kept(self) -> bool:
        """The plan leaves its region eager, and no reviewer has said otherwise."""
        return self.decision is not None and not self.fused and not self.by_person

    @property
    def gain(self) -> tuple[str, str]:
        """Speed-up beside eager with its origin, and the times behind it."""
        variant = self.variant
        if variant is None or variant.gain is None:
            return "", ""
        gain = variant.gain
        times = f"{duration(gain.eager_ms)} → {duration(gain.time_ms)} a call, floor {duration(gain.floor_ms)}"
        if variant.provider == "eager":
            return f"{duration(gain.eager_ms)} a call", f"{gain.origin}; floor {duration(gain.floor_ms)}"
        return f"×{gain.speedup:.3g}", f"{gain.origin}; {times}"

    @property
    def proved(self) -> tuple[int, int]:
        obligations = self.proposal.certificate.obligations
        return sum(o.status == "proved" for o in obligations), len(obligations)

    @property
    def other_variants(self) -> tuple[Variant, ...]:
        """Variants that a reviewer may choose in its place."""
        now = self.decision.variant if self.decision is not None and not self.decision.rejected else None
        return tuple(v for v in self.proposal.variants if v.available and v.name != now)

    @property
    def after_label(self) -> str:
        """The operator that stands for the region after fusion."""
        best = self.variant if self.fused else None
        best = best or next((v for v in self.proposal.variants if v.provider != "eager"), None)
        if best is None:
            return self.proposal.pattern
        return f"{best.op if best.op != '-' else self.proposal.pattern} · {best.provider}"


def cards_of(session: ReviewSession) -> tuple[Card, ...]:
    """One card a proposal: fused ones first, then those that a reviewer left eager, then those that the plan leaves so,
    then what is not in the plan.
    """
    plan = session.plan
    accepted = session.decisions.accepted(plan)
    decisions = {fusion.proposal_id: fusion for fusion in plan.decision.fusions}
    edited = {edit.field for edit in plan.decision.edits}
    inline = sum(len(p.subgraph) for p in plan.evidence.proposals) <= INLINE_NODES
    cards = [
        Card(
            index,
            proposal,
            decisions.get(proposal.id),
            accepted.get(proposal.id),
            inline,
            not edited.isdisjoint((f"fusions.{proposal.id}", f"fusions.{proposal.id}.variant")),
        )
        for index, proposal in enumerate(plan.evidence.proposals)
    ]
    return tuple(sorted(cards, key=lambda card: (card.decision is None, card.kept, not card.fused, card.index)))
