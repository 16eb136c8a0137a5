"""What the review page shows of a session, worked out once a request; templates only lay it out."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.schemas.fusion import FusionDecision, FusionProposal, Variant
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.policy import Policy, PolicyResult
from shardwright.workflows.environment import worker_environment
from shardwright.workflows.policy import evaluate
from shardwright.workflows.report.units import duration, size
from shardwright.workflows.review.decisions import Accepted
from shardwright.workflows.review.figures.front import Point, pareto_front
from shardwright.workflows.review.figures.memory import moments, waterfall
from shardwright.workflows.review.figures.mesh import mesh_grid
from shardwright.workflows.review.figures.timebar import step_bar
from shardwright.workflows.review.live import run_of
from shardwright.workflows.review.session import ReviewSession
from shardwright.workflows.review.trial import Row, Trial, cost_rows, current
from shardwright.workflows.watching import RunStatus

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
        return "eager, unchanged" if provider == "eager" else f"{provider} · {self.decision.variant}"

    @property
    def fused(self) -> bool:
        return self.decision is not None and not self.decision.rejected and self.decision.provider != "eager"

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


@dataclass(frozen=True)
class Entry:
    """One line of the decision log."""

    time: str
    actor: str
    what: str
    why: str
    plan: str


@dataclass(frozen=True)
class Page:
    """Everything on the page."""

    plan: AdaptationPlan
    cards: tuple[Card, ...]
    policy: PolicyResult | None
    policy_name: str
    stale: tuple[Row, ...]
    entries: tuple[Entry, ...]
    status: str
    approved: bool
    actor: str
    parent_cost: tuple[Row, ...]
    trial: Trial | None = None
    notice: str = ""
    run: RunStatus | str | None = None
    """Of the folder that the plan stands in."""

    @property
    def open_questions(self) -> int:
        return sum(question.answer is None for question in self.plan.decision.questions)

    @property
    def to_decide(self) -> tuple[Card, ...]:
        return tuple(card for card in self.cards if card.decision is not None)

    @property
    def others(self) -> tuple[Card, ...]:
        return tuple(card for card in self.cards if card.decision is None)

    @property
    def decided(self) -> int:
        return sum(card.state != "undecided" for card in self.to_decide)

    @property
    def undecided_eager(self) -> int:
        return sum(card.state == "undecided" and not card.fused for card in self.to_decide)

    @property
    def closed_because(self) -> str:
        """Why the plan cannot be approved now; empty where it can."""
        if self.approved:
            return "The plan is approved."
        waiting = len(self.to_decide) - self.decided
        if waiting:
            return f"{waiting} fusion{'s wait' if waiting > 1 else ' waits'} for a decision."
        if self.open_questions:
            return f"{self.open_questions} question{'s are' if self.open_questions > 1 else ' is'} open."
        return ""

    @property
    def axes(self) -> dict[str, str]:
        """What the edit form holds: the plan's values, the trial's where there is one."""
        values = current(self.plan)
        if self.trial is not None:
            values |= self.trial.values
        return values

    @property
    def waterfall(self) -> str:
        return waterfall(self.plan.evidence.cost.memory)

    @property
    def moments(self) -> str:
        return moments(self.plan.evidence.cost.memory)

    @property
    def step_bar(self) -> str:
        return step_bar(self.plan.evidence.cost.time)

    @property
    def mesh(self) -> str:
        decision = self.plan.decision
        experts = self.plan.evidence.profile.shape.num_experts
        return mesh_grid(decision.strategy.mesh, decision.cluster.devices_per_node, experts)

    @property
    def front(self) -> str:
        cost = self.plan.evidence.cost
        chosen = Point(
            "0",
            cost.time.step_ms,
            cost.memory.reserved_bytes,
            self.plan.decision.strategy.text(),
            pareto=True,
            feasible=cost.feasible,
            chosen=True,
        )
        rivals = [
            Point(str(i), a.step_ms, a.reserved_bytes, a.strategy.text(), a.pareto, a.feasible, href=f"/try/{i}")
            for i, a in enumerate(self.plan.evidence.alternatives[:MOST_RIVALS], start=1)
        ]
        return pareto_front([chosen, *rivals], cost.memory.budget_bytes)

    @property
    def verdict(self) -> str:
        """The plan in one sentence."""
        cost, decision = self.plan.evidence.cost, self.plan.decision
        fits = "fits" if cost.memory.fits else "does not fit"
        fused = sum(card.fused for card in self.to_decide)
        return (
            f"{decision.architecture} {fits} {decision.cluster.world_size} × {decision.cluster.device_name}: "
            f"{size(cost.memory.reserved_bytes)} of {size(cost.memory.budget_bytes)} a rank, "
            f"{duration(cost.time.step_ms)} a step, {fused} fused operator{'' if fused == 1 else 's'}."
        )


MOST_RIVALS = 40


def cards_of(session: ReviewSession) -> tuple[Card, ...]:
    """One card a proposal: fused ones first, then what runs eagerly, then what is not in the plan."""
    plan = session.plan
    accepted = session.decisions.accepted(plan)
    decisions = {fusion.proposal_id: fusion for fusion in plan.decision.fusions}
    inline = sum(len(p.subgraph) for p in plan.evidence.proposals) <= INLINE_NODES
    cards = [
        Card(index, proposal, decisions.get(proposal.id), accepted.get(proposal.id), inline)
        for index, proposal in enumerate(plan.evidence.proposals)
    ]
    return tuple(sorted(cards, key=lambda card: (card.decision is None, not card.fused, card.index)))


def page_of(
    session: ReviewSession,
    policy: Policy | None,
    policy_name: str,
    today: str,
    trial: Trial | None = None,
    notice: str = "",
) -> Page:
    """Look at the session once."""
    plan = session.plan
    words, code = session.status()
    cards = cards_of(session)
    parent = session.parent()
    return Page(
        plan=plan,
        cards=cards,
        policy=evaluate(plan, policy, today) if policy is not None else None,
        policy_name=policy_name,
        stale=stale_fields(plan),
        entries=entries(session),
        status=words,
        approved=int(code) == 0,
        actor=session.actor,
        parent_cost=cost_rows(parent, plan) if parent is not None else (),
        trial=trial,
        notice=notice,
        run=run_of(session.file),
    )


def stale_fields(plan: AdaptationPlan) -> tuple[Row, ...]:
    """Versions the plan pins that this machine does not have: apply would refuse the plan here."""
    here = worker_environment(plan.evidence.cluster)
    pinned = plan.decision.environment
    return tuple(
        Row(f"environment.{name}", pinned[name], here.get(name, "absent"))
        for name in sorted(pinned)
        if pinned[name] != here.get(name, "absent")
    )


def entries(session: ReviewSession) -> tuple[Entry, ...]:
    """Edits of this plan, acceptances, and every verdict in the log, in that order."""
    plan = session.plan
    found = [
        Entry("", edit.actor, f"edited {edit.field}: {edit.old} → {edit.new}", edit.reason, "this plan")
        for edit in plan.decision.edits
    ]
    accepted = sorted(session.decisions.accepted(plan).values(), key=lambda item: (item.time, item.proposal_id))
    found += [Entry(item.time, item.actor, f"accepted {item.proposal_id}", "", "this plan") for item in accepted]
    for verdict in session.verdicts():
        mine = verdict.decision_sha256 == plan.hashes.decision
        words = "approved the plan" if verdict.verdict == "approve" else "rejected the plan"
        name = "this plan" if mine else f"plan {verdict.decision_sha256[:12]}…"
        signed = " · signed" if verdict.hmac_sha256 else ""
        found.append(Entry(verdict.time, verdict.actor, words + signed, verdict.reason, name))
    return tuple(found)
