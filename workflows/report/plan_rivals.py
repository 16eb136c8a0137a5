"""What a report says about the strategies beside the chosen one. All are compared on one set of terms."""

from __future__ import annotations

from shardwright.schemas.plan import AdaptationPlan, Alternative
from shardwright.workflows.report.blocks import Document, Heading, Table, Text
from shardwright.workflows.report.units import duration, size


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
