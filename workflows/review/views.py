"""What the review page shows of a session, worked out once a request; templates only lay it out."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.schemas.plan import AdaptationPlan, Alternative
from shardwright.schemas.policy import Policy, PolicyResult
from shardwright.workflows.environment import worker_environment
from shardwright.workflows.policy import evaluate
from shardwright.workflows.report.plan_content import (
    as_rivals,
    compared_as_run,
    figures,
    on_front,
    unfused_ms,
    with_fusions,
)
from shardwright.workflows.report.plan_verdict import signed_rows, verdict
from shardwright.workflows.review.cards import Card, cards_of
from shardwright.workflows.review.figures.front import Point, pareto_front
from shardwright.workflows.review.figures.memory import moments, waterfall
from shardwright.workflows.review.figures.mesh import mesh_grid
from shardwright.workflows.review.figures.timebar import step_bar
from shardwright.workflows.review.kept import Group, grouped
from shardwright.workflows.review.live import run_of
from shardwright.workflows.review.session import ReviewSession
from shardwright.workflows.review.trial import Row, Trial, cost_rows, current
from shardwright.workflows.watching import RunStatus


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
    def to_look_at(self) -> tuple[Card, ...]:
        """What changes how the model runs, or was changed by a reviewer: these cards stand open."""
        return tuple(card for card in self.to_decide if not card.kept)

    @property
    def kept(self) -> tuple[Group, ...]:
        """What the plan leaves eager, by reason: these cards are folded."""
        return grouped(card for card in self.to_decide if card.kept)

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
    def chosen_priced(self) -> tuple[float, int]:
        """Step time and reserved bytes of the chosen strategy, on the terms of its rivals."""
        return as_rivals(self.plan)

    @property
    def chosen_on_front(self) -> bool:
        return on_front(self.plan)

    @property
    def with_fusions(self) -> str:
        """What the plan's fused operators make of the chosen strategy; empty where it has none."""
        return with_fusions(self.plan)

    @property
    def both(self) -> bool:
        """Whether step times stand with fused operators, and beside them without."""
        return compared_as_run(self.plan)

    @property
    def unfused_ms(self) -> float:
        return unfused_ms(self.plan)

    @property
    def rivals(self) -> tuple[tuple[Alternative, float, int], ...]:
        """The rivals shown, each with the step time and reserved bytes that are compared."""
        return tuple((rival, *figures(self.plan, rival)) for rival in self.plan.evidence.alternatives[:MOST_RIVALS])

    @property
    def front(self) -> str:
        cost, (step_ms, reserved_bytes) = self.plan.evidence.cost, self.chosen_priced
        chosen = Point(
            "0",
            step_ms,
            reserved_bytes,
            self.plan.decision.strategy.text(),
            pareto=self.chosen_on_front,
            feasible=cost.feasible,
            chosen=True,
        )
        rivals = [
            Point(str(i), ms, held, a.strategy.text(), a.pareto, a.feasible, href=f"/try/{i}")
            for i, (a, ms, held) in enumerate(self.rivals, start=1)
        ]
        return pareto_front([chosen, *rivals], cost.memory.budget_bytes)

    @property
    def verdict(self) -> str:
        """The plan in one sentence."""
        return verdict(self.plan)

    @property
    def signed(self) -> tuple[tuple[str, str, bool], ...]:
        """What an approval covers: name, value, whether the value is code."""
        return tuple((name, value.strip("`"), value.startswith("`")) for name, value in signed_rows(self.plan))


MOST_RIVALS = 40


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
    for said in session.verdicts():
        mine = said.decision_sha256 == plan.hashes.decision
        words = "approved the plan" if said.verdict == "approve" else "rejected the plan"
        name = "this plan" if mine else f"plan {said.decision_sha256[:12]}…"
        signed = " · signed" if said.hmac_sha256 else ""
        found.append(Entry(said.time, said.actor, words + signed, said.reason, name))
    return tuple(found)
