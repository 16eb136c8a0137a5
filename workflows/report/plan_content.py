"""What a report says about a plan. The same plan gives the same words."""

from __future__ import annotations

from shardwright.schemas.fusion import FusionDecision, FusionProposal, Variant
from shardwright.schemas.plan import AdaptationPlan, Alternative
from shardwright.schemas.words import plural
from shardwright.workflows.report import svg
from shardwright.workflows.report.blocks import Block, Document, Figure, Heading, Table, Text
from shardwright.workflows.report.plan_verdict import beyond_times, signed_section, tiles, verdict, way
from shardwright.workflows.report.units import duration, short, size


def plan_document(plan: AdaptationPlan, *, alone: bool = False) -> Document:
    """The verdict and its price, what an approval signs, fusions, memory, time, alternatives, pins.

    Args:
        alone: under a title of its own, with memory and step drawn; a run's report has both beside what was measured.
    """
    return (
        *plan_summary(plan)[alone:],
        *signed_section(plan),
        *fusion_section(plan),
        *cost_section(plan, figures=alone),
        *alternatives_section(plan),
        *advice_section(plan),
        *pins_section(plan),
    )


def plan_summary(plan: AdaptationPlan) -> Document:
    """Whether the plan fits and what it costs, why it was chosen, what is open, what a reviewer changed."""
    decision = plan.decision
    blocks: list[Block] = [Heading("Plan"), Text(verdict(plan)), tiles(plan)]
    blocks += [Text(line) for line in plan.evidence.explanation]
    if decision.questions:
        asked = tuple((q.id, q.text, ", ".join(q.choices), q.answer or "open") for q in decision.questions)
        blocks.append(Text("What rules could not decide:"))
        blocks.append(Table(("question", "", "choices", "answer"), asked))
    if decision.parent_hash is not None:
        edits = tuple((edit.field, str(edit.old), str(edit.new), edit.reason, edit.actor) for edit in decision.edits)
        blocks.append(Text(f"A child of plan `{short(decision.parent_hash)}`, edited by a reviewer:"))
        blocks.append(Table(("field", "was", "is", "reason", "by"), edits))
    return tuple(blocks)


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


def fusion_section(plan: AdaptationPlan) -> Document:
    """What is installed, what was proposed and is not, every provider's time, every obligation."""
    proposals = {p.id: p for p in plan.evidence.proposals}
    rows = []
    for fusion in plan.decision.fusions:
        proposal = proposals.get(fusion.proposal_id)
        rejected = f"{fusion.provider} (rejected by a reviewer)"
        rows.append(
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
    if not rows and not left_out:
        return (Heading("Fusions"), Text("Structure parsing proposed none."))
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
        Table(
            ("proposal", "places", "runs by", "proved", "gain", "a call", "reason"),
            tuple(rows),
            numeric=(1,),
            prose=6,
        ),
        Table(
            ("proposal", "places", "proved", "reason"),
            left_out,
            numeric=(1,),
            caption="Proposals that are not in the plan, and why",
            prose=3,
            closed=True,
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


def cost_section(plan: AdaptationPlan, *, figures: bool = False) -> Document:
    """Every term of memory and of time with its origin and formula.

    Args:
        figures: draw both first, and leave the tables closed behind them.
    """
    memory, time = plan.evidence.cost.memory, plan.evidence.cost.time
    parts = tuple(
        (c.name, size(c.bytes), "✓" if memory.peak_moment in c.moments else "", c.origin, f"`{c.formula}`")
        for c in sorted(memory.components, key=lambda c: (-c.bytes, c.name))
    )
    terms = tuple(
        (c.name, duration(c.milliseconds), c.kind.replace("_", " "), c.origin, f"`{c.formula}`")
        for c in sorted(time.components, key=lambda c: (-c.milliseconds, c.name))
    )
    by_term = Table(
        ("memory term", "size", "at peak", "origin", "formula"),
        parts,
        numeric=(1,),
        caption="Memory of the fullest rank",
        closed=figures,
    )
    by_time = Table(
        ("time term", "time", "kind", "origin", "formula"),
        terms,
        numeric=(1,),
        caption="One optimizer step on the slowest rank",
        closed=figures,
    )
    memory_bar, step_bar = cost_figures(plan) if figures else ((), ())
    return (Heading("Predicted memory and time"), *memory_bar, by_term, *step_bar, by_time)


def cost_figures(plan: AdaptationPlan) -> tuple[Document, Document]:
    """Memory at its peak beside the budget, and the step, each as one bar of its terms."""
    memory, time = plan.evidence.cost.memory, plan.evidence.cost.time
    alive = [(c.name, float(c.bytes)) for c in memory.components if memory.peak_moment in c.moments]
    if (slack := memory.reserved_bytes - sum(value for _, value in alive)) > 0:
        alive.append(("slack and communicators", float(slack)))
    visible = [(c.name, c.milliseconds) for c in time.components if c.kind != "hidden_communication"]
    budget = (f"budget {size(memory.budget_bytes)}", float(memory.budget_bytes))
    moment = memory.peak_moment.replace("_", " ")

    def bar(parts: list[tuple[str, float]], text: str, limit: svg.Part | None, title: str) -> Document:
        row = ("predicted", sorted(parts, key=lambda part: -part[1]), text)
        return (Figure(svg.bars(row, None, limit, title), f"{title}."),)

    return (
        bar(alive, size(memory.reserved_bytes), budget, f"Memory that the fullest rank reserves, at {moment}"),
        bar(visible, duration(time.step_ms), None, "Time of one optimizer step on the slowest rank"),
    )


def compared_as_run(plan: AdaptationPlan) -> bool:
    """Whether the chosen strategy and its rivals are compared with their own fused operators; else all without.

    A reviewer's word on a fusion holds for the plan alone, so beside its rivals such a plan stands without any.
    """
    known = all(rival.fused_step_ms is not None for rival in plan.evidence.alternatives)
    return known and not any(edit.field.startswith("fusions.") for edit in plan.decision.edits)


def figures(plan: AdaptationPlan, rival: Alternative) -> tuple[float, int]:
    """Step time in ms and reserved bytes of a rival, on the terms of the comparison."""
    return rival.as_run if compared_as_run(plan) else (rival.step_ms, rival.reserved_bytes)


def as_rivals(plan: AdaptationPlan) -> tuple[float, int]:
    """Step time in ms and reserved bytes of the chosen strategy, on the terms of its rivals."""
    plain, cost = plan.evidence.plain, plan.evidence.cost
    if plain is None or compared_as_run(plan):
        return cost.time.step_ms, cost.memory.reserved_bytes
    return plain.step_ms, plain.reserved_bytes


def unfused_ms(plan: AdaptationPlan) -> float:
    """Step time of the chosen strategy without fused operators."""
    plain, cost = plan.evidence.plain, plan.evidence.cost
    return cost.time.step_ms if plain is None else plain.step_ms


def on_front(plan: AdaptationPlan) -> bool:
    """Whether no rival is at least as good as the chosen strategy in step time and memory, and better in one."""
    own = as_rivals(plan)
    rivals = [figures(plan, rival) for rival in plan.evidence.alternatives if rival.feasible]
    return not any(step <= own[0] and held <= own[1] and (step, held) != own for step, held in rivals)


def with_fusions(plan: AdaptationPlan) -> str:
    """Which figures are compared, where fused operators make two of each; else empty."""
    if plan.evidence.alternatives and compared_as_run(plan):
        return "Each is priced with its own fused operators; step times without any stand beside."
    if plan.evidence.plain is None:
        return ""
    cost = plan.evidence.cost
    return (
        "All are priced without fused operators, the chosen one too; with its own it takes "
        f"{duration(cost.time.step_ms)} and {size(cost.memory.reserved_bytes)}."
    )


def alternatives_section(plan: AdaptationPlan) -> Document:
    """The chosen strategy and its rivals, priced alike, each with why it lost."""
    if not plan.evidence.alternatives:
        return ()
    step_ms, reserved_bytes = as_rivals(plan)
    fits = plan.evidence.cost.feasible
    both = compared_as_run(plan)
    own = (
        f"`{plan.decision.strategy.text()}`",
        duration(step_ms),
        *((duration(unfused_ms(plan)),) if both else ()),
        size(reserved_bytes),
    )
    chosen = (*own, "fits" if fits else "does not fit", "yes" if on_front(plan) else "", "the plan's own")
    rivals = tuple(
        (
            f"`{a.strategy.text()}`",
            duration(figures(plan, a)[0]),
            *((duration(a.step_ms),) if both else ()),
            size(figures(plan, a)[1]),
            "fits" if a.feasible else "does not fit",
            "yes" if a.pareto else "",
            a.lost_because,
        )
        for a in plan.evidence.alternatives
    )
    headers = ("strategy", "step", *(("unfused",) if both else ()), "memory", "budget", "on the front", "lost because")
    numeric = tuple(range(1, headers.index("budget")))
    words = with_fusions(plan)
    told = (Text(words),) if words else ()
    table = Table(headers, (chosen, *rivals), numeric=numeric, prose=len(headers) - 1)
    return (Heading("Alternatives"), *told, table)


def advice_section(plan: AdaptationPlan) -> Document:
    """What a language model suggested, and what the gates made of it; nothing where none was asked."""
    record = plan.evidence.provenance.llm_record
    if record is None:
        return ()
    rows = tuple(
        (one.kind, one.subject, "accepted" if one.accepted else "refused", one.because, one.words)
        for one in record.suggestions
    )
    spent = ", ".join(record.spent())
    words = f"{record.model} was asked ({record.mode}): {record.said}. Rules decided; its own words stand last."
    words = f"{words} Spent: {spent}."
    table = (Table(("suggestion", "about", "gate", "because", "its words"), rows, prose=4),) if rows else ()
    return (Heading("Language model"), Text(words), *table)


def pins_section(plan: AdaptationPlan) -> Document:
    decision, provenance, search = plan.decision, plan.evidence.provenance, plan.evidence.search
    rows = [
        ("checkpoint", f"`{decision.checkpoint.digest}`"),
        ("training data", f"`{decision.data.train_sha256}`"),
        ("held-out data", f"`{decision.data.held_out_sha256}`"),
        ("cluster", f"`{decision.cluster.digest}`"),
        ("graph", f"`{provenance.graph_digest}`"),
        ("workers", ", ".join(f"{k} {v}" for k, v in sorted(decision.environment.items()))),
        ("planned with", ", ".join(f"{k} {v}" for k, v in sorted(provenance.versions.items()))),
        ("language model", provenance.llm),
        ("search", f"{plural(search.trials, 'trial')} ({search.sampler}, seed {search.seed})"),
    ]
    if (code := decision.remote_code) is not None:
        rows += [("code of the checkpoint, which workers run", f"`{code.sha256}`")]
        rows += [(name, f"`{found}`") for name, found in sorted(code.files.items())]
    return (Heading("What the plan pins"), Table(("", ""), tuple(rows)))
