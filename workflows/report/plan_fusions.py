"""What a report says about a plan's fusions: what is installed, what stays eager, who proved and timed what."""

from __future__ import annotations

from shardwright.schemas.fusion import FusionDecision, FusionProposal, Gain, Variant
from shardwright.schemas.plan import AdaptationPlan
from shardwright.workflows.report.blocks import Document, Heading, Table, Text
from shardwright.workflows.report.plan_verdict import beyond_times, way
from shardwright.workflows.report.units import duration


def certificate_status(proposal: FusionProposal | None) -> str:
    """``✓ 11 of 11``, or how many were proved of a proposal that is refused."""
    if proposal is None:
        return "no proposal"
    obligations = proposal.certificate.obligations
    proved = sum(o.status == "proved" for o in obligations)
    if proposal.certificate.legal:
        return f"✓ {proved} of {len(obligations)}"
    return f"✗ {proved} of {len(obligations)}: refused"


def gain_text(fusion: FusionDecision, proposal: FusionProposal | None) -> tuple[str, str]:
    """Speed-up of the variant that is installed with its origin, and the time of a call, before it eager's."""
    variant = next((v for v in proposal.variants if v.name == fusion.variant), None) if proposal else None
    if variant is None or variant.gain is None:
        return "–", "–"
    gain = variant.gain
    if fusion.provider == "eager":
        return "–", f"{duration(gain.eager_ms)} ({gain.origin})"
    return f"×{gain.speedup:.3g} ({gain.origin})", f"{duration(gain.eager_ms)} → {duration(gain.time_ms)}"


def ranked_providers(proposal: FusionProposal) -> str:
    """Every provider of a region with its time and where that comes from, the fastest first, usable ones before others.

    Of a provider with several variants the one proposed stands for it, else its fastest usable one.
    """
    best: dict[str, Variant] = {}
    for variant in sorted(proposal.variants, key=lambda v: v.name != proposal.chosen):
        best.setdefault(variant.provider, variant)

    def place(variant: Variant) -> tuple[float, bool, bool, str]:
        time_ms = variant.gain.time_ms if variant.gain else float("inf")
        return time_ms, variant.rival, not variant.available, variant.provider

    words = []
    for variant in sorted(best.values(), key=place):
        gain, shut = variant.gain, "" if variant.available else "not usable here"
        shut = "not installable" if variant.rival else shut
        said = ", ".join(word for word in (gain.origin if gain else "not ranked", shut) if word)
        words.append(
            f"{variant.provider} {duration(gain.time_ms)} ({said})" if gain else f"{variant.provider} ({said})"
        )
    return " · ".join(words)


def time_source(fusion: FusionDecision, proposal: FusionProposal | None) -> str:
    """Where the times come from that a fusion was decided by: its own way's and eager's."""
    variant = next((v for v in proposal.variants if v.name == fusion.variant), None) if proposal else None
    if variant is None or variant.gain is None:
        return (variant.unranked_because if variant else "") or "no time is known"
    return gain_source(variant.gain)


def gain_source(gain: Gain) -> str:
    """Where a gain's times come from, its origin first."""
    return gain.basis if gain.basis.startswith(gain.origin) else f"{gain.origin}: {gain.basis}"


def fusion_section(plan: AdaptationPlan) -> Document:
    """What is installed, what was proposed and is not, every provider's time, every obligation."""
    proposals = {p.id: p for p in plan.evidence.proposals}
    fused: list[tuple[str, ...]] = []
    eager: list[tuple[str, ...]] = []
    for fusion in plan.decision.fusions:
        proposal = proposals.get(fusion.proposal_id)
        rejected = f"{fusion.provider} (rejected by a reviewer)"
        (eager if fusion.provider == "eager" else fused).append(
            (
                f"`{fusion.proposal_id}`",
                str(len(fusion.modules)),
                rejected if fusion.rejected else way(fusion.provider, fusion.variant),
                certificate_status(proposal),
                *gain_text(fusion, proposal),
                beyond_times(fusion.reason or (proposal.reason if proposal else "")),
            )
        )
    decided = {fusion.proposal_id for fusion in plan.decision.fusions}
    left_out = tuple(
        (f"`{p.id}`", str(len(p.region.modules)), certificate_status(p), p.reason)
        for p in plan.evidence.proposals
        if p.id not in decided
    )
    if not fused and not eager and not left_out:
        return (Heading("Fusions"), Text("Structure parsing proposed none."))
    headers = ("proposal", "places", "runs by", "proved", "gain", "a call", "reason")
    ranking = tuple((f"`{p.id}`", ranked_providers(p)) for p in plan.evidence.proposals)
    obligations = tuple(
        (
            f"`{proposal.id}`",
            o.name,
            {"proved": "✓ proved", "refuted": "✗ refuted", "unknown": "? unknown"}[o.status],
            o.evidence,
        )
        for proposal in plan.evidence.proposals
        for o in proposal.certificate.obligations
    )
    return (
        Heading("Fusions"),
        *(() if fused else (Text("None runs fused on this cluster."),)),
        Table(headers, tuple(fused), numeric=(1,), prose=6),
        Table(headers, tuple(eager), numeric=(1,), caption="Regions that stay eager, and why", prose=6, closed=True),
        Table(
            ("proposal", "places", "proved", "reason"),
            left_out,
            numeric=(1,),
            caption="Proposals that are not in the plan, and why",
            prose=3,
            closed=True,
        ),
        Table(
            ("proposal", "the time of its way, from"),
            tuple((f"`{f.proposal_id}`", time_source(f, proposals.get(f.proposal_id))) for f in plan.decision.fusions),
            caption="Where the time of every fusion comes from",
            folded=True,
        ),
        Table(
            ("proposal", "a call by each provider, the fastest first"),
            ranking,
            caption="Providers of every region, on this cluster's device",
            folded=True,
        ),
        Table(
            ("proposal", "obligation", "status", "evidence"),
            obligations,
            caption="Every obligation of every certificate",
            folded=True,
        ),
    )
