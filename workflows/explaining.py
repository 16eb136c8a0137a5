"""Why a plan is what it is: the whole, or one subject."""

from __future__ import annotations

from difflib import get_close_matches

from shardwright.schemas.errors import UsageError
from shardwright.schemas.plan import AdaptationPlan
from shardwright.workflows.report.blocks import Document, Heading, Table, Text
from shardwright.workflows.report.plan_content import (
    alternatives_section,
    cost_section,
    fusion_section,
    gain_source,
    plan_summary,
)
from shardwright.workflows.report.plan_verdict import signed_section
from shardwright.workflows.report.units import duration


def explanation(plan: AdaptationPlan, subject: str | None) -> Document:
    """What there is to say about a plan.

    Args:
        subject: ``strategy``, ``memory``, ``time``, ``fusions``, a proposal's id, or ``None`` for everything.

    Raises:
        UsageError: ``unknown-subject``.
    """
    sections = {
        "strategy": lambda: (*plan_summary(plan), *signed_section(plan), *alternatives_section(plan)),
        "memory": lambda: cost_section(plan)[:2],
        "time": lambda: (cost_section(plan)[0], cost_section(plan)[2]),
        "fusions": lambda: fusion_section(plan),
    }
    if subject is None:
        return (
            *plan_summary(plan),
            *signed_section(plan),
            *fusion_section(plan),
            *cost_section(plan),
            *alternatives_section(plan),
        )
    if subject in sections:
        return sections[subject]()
    if any(proposal.id == subject for proposal in plan.evidence.proposals):
        return proposal_document(plan, subject)
    known = [*sections, *(proposal.id for proposal in plan.evidence.proposals)]
    near = [name for name in known if subject in name] or get_close_matches(subject, known, cutoff=0.4)
    advice = f"name one of: {', '.join(near or known)}"
    if near:
        advice = f"{advice}; `shardwright explain PLAN fusions` lists all"
    raise UsageError("unknown-subject", f"nothing called {subject!r}", where="SUBJECT", next_action=advice)


def proposal_document(plan: AdaptationPlan, proposal_id: str) -> Document:
    """One proposal: region, ways to run it with their gains, every obligation with its evidence."""
    proposal = next(p for p in plan.evidence.proposals if p.id == proposal_id)
    decision = next((f for f in plan.decision.fusions if f.proposal_id == proposal_id), None)
    verdict = "not installed"
    if decision is not None:
        verdict = f"rejected: {decision.reason}" if decision.rejected else f"runs by {decision.provider}"
    variants = tuple(
        (
            v.name,
            v.provider,
            f"{duration(v.gain.time_ms)} beside {duration(v.gain.eager_ms)} eager, floor {duration(v.gain.floor_ms)}"
            if v.gain
            else "not ranked",
            gain_source(v.gain) if v.gain else v.unranked_because or "–",
            "yes" if v.available else f"no: {v.unavailable_because}",
        )
        for v in proposal.variants
    )
    obligations = tuple((o.name, o.status, o.evidence) for o in proposal.certificate.obligations)
    return (
        Heading(f"{proposal.title} (`{proposal.id}`)", 3),
        Text(f"{verdict}. {proposal.reason}"),
        Table(
            ("", ""),
            (
                ("pattern", f"{proposal.pattern} version {proposal.certificate.pattern_version}"),
                ("layer kind", proposal.region.layer_kind),
                ("instances", f"{len(proposal.region.modules)}: {', '.join(proposal.region.modules[:4])}"),
                ("roles", ", ".join(f"{role} = {name}" for role, name in sorted(proposal.region.roles.items()))),
                ("source", ", ".join(proposal.certificate.source_lines)),
                ("matched nodes", ", ".join(proposal.certificate.matched_nodes)),
            ),
        ),
        Table(("way", "provider", "time", "origin", "available"), variants, prose=3),
        Table(("obligation", "status", "evidence"), obligations, prose=2),
    )
