"""What an edit would do, before it is made: legality, cost and policy beside the plan's, nothing written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from shardwright.schemas.errors import ShardwrightError
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.policy import Policy, PolicyFinding
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.workflows.edited_strategy import completed, flat
from shardwright.workflows.edits import edit_axes
from shardwright.workflows.policy import evaluate
from shardwright.workflows.report.units import change, duration, size
from shardwright.workflows.stages import Stages

AXES = (
    *(f"mesh.{name}" for name in Mesh.model_fields),
    *(name for name in ParallelStrategy.model_fields if name != "mesh"),
)
"""Every axis of a strategy, as forms name them."""


def choices(axis: str) -> tuple[str, ...]:
    """The values of an axis that has few; empty where any number may be tried."""
    field = ParallelStrategy.model_fields.get(axis)
    if field is None:
        return ()
    if field.annotation is bool:
        return ("true", "false")
    return tuple(map(str, get_args(field.annotation))) if get_origin(field.annotation) is Literal else ()


def is_list(axis: str) -> bool:
    """Whether an axis takes several numbers, written with commas."""
    field = ParallelStrategy.model_fields.get(axis)
    return field is not None and get_origin(field.annotation) is tuple


SAME = 0.0005
"""Relative change below which two figures read alike."""


@dataclass(frozen=True)
class Row:
    """One figure of the diff."""

    name: str
    before: str
    after: str
    change: str = ""
    tone: str = ""
    """``better``, ``worse`` or empty; the words say it too."""


@dataclass(frozen=True)
class Trial:
    """An edit's outcome: a child that could be made, or why not."""

    values: dict[str, str]
    """Axes that the reviewer changed."""
    strategy: ParallelStrategy | None
    child: AdaptationPlan | None
    error: ShardwrightError | None
    axes: tuple[Row, ...] = ()
    """Every axis that would differ; what merely follows is marked."""
    cost: tuple[Row, ...] = ()
    fusions: tuple[Row, ...] = ()
    policy: tuple[PolicyFinding, ...] = ()


def current(plan: AdaptationPlan) -> dict[str, str]:
    """Axis → value as text, of the plan as it is."""
    leaves = flat(plan.decision.strategy.whole())
    return {axis: as_text(leaves[axis]) for axis in AXES if axis in leaves}


def as_text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def changed(plan: AdaptationPlan, form: dict[str, str]) -> dict[str, str]:
    """The axes of a form that differ from the plan."""
    now = current(plan)
    return {axis: form[axis].strip() for axis in AXES if axis in form and form[axis].strip() != now[axis]}


def attempt(stages: Stages, plan: AdaptationPlan, values: dict[str, str], policy: Policy | None, today: str) -> Trial:
    """Try an edit.

    Args:
        values: axis → new value, only those that differ.
        policy: applied to the child where there is one.
        today: date for the policy's waivers, ``2026-01-31``.
    """
    if not values:
        return Trial({}, None, None, None)
    strategy = None
    try:
        strategy = completed(plan, values)
        child = edit_axes(stages, plan, values, reason="trial", actor="trial")
    except ShardwrightError as error:
        return Trial(values, strategy, None, error, _axes(plan, strategy, values) if strategy else ())
    findings = evaluate(child, policy, today).findings if policy is not None else ()
    return Trial(
        values,
        strategy,
        child,
        None,
        _axes(plan, child.decision.strategy, values),
        cost_rows(plan, child),
        _fusions(plan, child),
        findings,
    )


def _axes(plan: AdaptationPlan, strategy: ParallelStrategy, values: dict[str, str]) -> tuple[Row, ...]:
    old = flat(plan.decision.strategy.whole())
    new = flat(strategy.whole())
    return tuple(
        Row(name, as_text(old[name]), as_text(new[name]), "" if name in values else "follows")
        for name in new
        if old[name] != new[name]
    )


def cost_rows(before: AdaptationPlan, after: AdaptationPlan) -> tuple[Row, ...]:
    """Step time, memory, throughput and GPU-hours of two plans, and the terms that moved most."""
    a, b = before.evidence.cost, after.evidence.cost
    rows = [
        _row("step time", a.time.step_ms, b.time.step_ms, duration(a.time.step_ms), duration(b.time.step_ms)),
        _row(
            "memory of the fullest rank",
            a.memory.reserved_bytes,
            b.memory.reserved_bytes,
            size(a.memory.reserved_bytes),
            size(b.memory.reserved_bytes),
        ),
        _row(
            "tokens a second",
            a.time.tokens_per_s,
            b.time.tokens_per_s,
            f"{a.time.tokens_per_s:,.0f}",
            f"{b.time.tokens_per_s:,.0f}",
            more_is_better=True,
        ),
        _row("GPU-hours", a.gpu_hours, b.gpu_hours, f"{a.gpu_hours:.3g}", f"{b.gpu_hours:.3g}"),
    ]
    old = {c.name: c.milliseconds for c in a.time.components}
    new = {c.name: c.milliseconds for c in b.time.components}
    moved = sorted({*old, *new}, key=lambda name: -abs(new.get(name, 0) - old.get(name, 0)))
    for name in moved[:3]:
        x, y = old.get(name, 0.0), new.get(name, 0.0)
        if x != y:
            rows.append(_row(f"↳ {name.replace('_', ' ')}", x, y, duration(x), duration(y)))
    return tuple(rows)


def _row(name: str, a: float, b: float, before: str, after: str, *, more_is_better: bool = False) -> Row:
    if a == b or (a and abs(b - a) / abs(a) < SAME):
        return Row(name, before, after, "unchanged")
    tone = "better" if (b > a) == more_is_better else "worse"
    return Row(name, before, after, f"{change(a, b)} {tone}" if a else tone, tone)


def _fusions(before: AdaptationPlan, after: AdaptationPlan) -> tuple[Row, ...]:
    old = {f.proposal_id: f"{f.variant}{' (rejected)' if f.rejected else ''}" for f in before.decision.fusions}
    new = {f.proposal_id: f"{f.variant}{' (rejected)' if f.rejected else ''}" for f in after.decision.fusions}
    names = [*old, *(name for name in new if name not in old)]
    return tuple(
        Row(name, old.get(name, "none"), new.get(name, "none")) for name in names if old.get(name) != new.get(name)
    )
