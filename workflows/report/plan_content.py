"""What a report says about a plan. The same plan gives the same words."""

from __future__ import annotations

from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.words import plural
from shardwright.workflows.report import svg
from shardwright.workflows.report.blocks import Block, Document, Figure, Heading, Table, Text
from shardwright.workflows.report.plan_fusions import (
    certificate_status,
    fusion_section,
    gain_source,
    gain_text,
    ranked_providers,
    time_source,
)
from shardwright.workflows.report.plan_rivals import (
    alternatives_section,
    as_rivals,
    compared_as_run,
    figures,
    on_front,
    unfused_ms,
    with_fusions,
)
from shardwright.workflows.report.plan_verdict import signed_section, tiles, verdict
from shardwright.workflows.report.units import duration, short, size

__all__ = [
    "advice_section",
    "alternatives_section",
    "as_rivals",
    "certificate_status",
    "compared_as_run",
    "cost_figures",
    "cost_section",
    "figures",
    "fusion_section",
    "gain_source",
    "gain_text",
    "on_front",
    "pins_section",
    "plan_document",
    "plan_report",
    "plan_summary",
    "ranked_providers",
    "time_source",
    "unfused_ms",
    "with_fusions",
]


def plan_report(plan: AdaptationPlan) -> Document:
    """The report of a plan alone, whoever writes it out: :func:`plan_document` under a title."""
    title = Heading(f"Plan for {plan.decision.architecture}: {plan.decision.recipe.name}", 1)
    return (title, *plan_document(plan, alone=True))


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


FILES_SHOWN = 8
"""Most weight files that a report names one by one."""


def pinned_files(plan: AdaptationPlan) -> dict[str, str]:
    """Weight file → hash of its sampled values; a checkpoint of many files by one hash over all."""
    files = {} if plan.decision.weights is None else plan.decision.weights.files
    return files if len(files) <= FILES_SHOWN else {f"{len(files)} weight files": sha256_of(files)}


def pins_section(plan: AdaptationPlan) -> Document:
    decision, provenance, search = plan.decision, plan.evidence.provenance, plan.evidence.search
    rows = [
        ("checkpoint", f"`{decision.checkpoint.digest}`"),
        *(("values of " + name, f"`{digest}`") for name, digest in sorted(pinned_files(plan).items())),
        ("training data", f"`{decision.data.train_sha256}`"),
        ("held-out data", f"`{decision.data.held_out_sha256}`"),
        ("cluster", f"`{decision.cluster.digest}`"),
        ("graph", f"`{provenance.graph_digest}`"),
        *((("calibration", f"`{provenance.calibration_digest}`"),) if provenance.calibration_digest else ()),
        *(("measured times", f"`{file.sha256}`") for file in provenance.evidence_files),
        ("workers", ", ".join(f"{k} {v}" for k, v in sorted(decision.environment.items()))),
        ("planned with", ", ".join(f"{k} {v}" for k, v in sorted(provenance.versions.items()))),
        ("language model", provenance.llm),
        ("search", f"{plural(search.trials, 'trial')} ({search.sampler}, seed {search.seed})"),
    ]
    if (code := decision.remote_code) is not None:
        rows += [("code of the checkpoint, which workers run", f"`{code.sha256}`")]
        rows += [(name, f"`{found}`") for name, found in sorted(code.files.items())]
    return (Heading("What the plan pins"), Table(("", ""), tuple(rows)))
