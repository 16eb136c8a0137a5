"""What a report says about a run: the result first, then predicted beside measured, and what the run leaves behind."""

from __future__ import annotations

from shardwright.schemas.approval import Approval
from shardwright.schemas.canonical import canonical_bytes
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import RunRecord
from shardwright.workflows.report import svg
from shardwright.workflows.report.blocks import Block, Document, Figure, Heading, Table, Text, Tile, Tiles
from shardwright.workflows.report.plan_content import plan_document
from shardwright.workflows.report.run_outcome import (
    adapter_section,
    approval_section,
    check_section,
    load_section,
    preflight_section,
    ways_section,
)
from shardwright.workflows.report.units import change, duration, off_by, size

__all__ = [
    "adapter_section",
    "approval_section",
    "check_section",
    "held_out",
    "load_section",
    "loss_section",
    "measured_section",
    "preflight_section",
    "run_document",
    "summary_tiles",
    "ways_section",
]


def run_document(plan: AdaptationPlan, record: RunRecord, approval: Approval | None = None) -> Document:
    """The whole report of a finished run, without any time of day.

    Figures have six significant digits first: the workflow's store keeps those, ``run.json`` keeps all, and both must
    print alike.
    """
    record = RunRecord.model_validate_json(canonical_bytes(record))
    title = f"{plan.decision.architecture} adapted: {plan.decision.recipe.name}"
    return (
        Heading(title, 1),
        summary_tiles(plan, record),
        *measured_section(plan, record),
        *loss_section(record),
        *check_section(record),
        *preflight_section(record),
        *ways_section(record),
        *adapter_section(plan, record),
        *approval_section(approval),
        *plan_document(plan),
        *load_section(record),
    )


def held_out(record: RunRecord) -> tuple[float, float] | None:
    """Held-out loss of the base and at the end, or ``None`` before both are known."""
    evaluations = sorted(record.evaluations, key=lambda item: item.step)
    if len(evaluations) < 2:
        return None
    return evaluations[0].loss, evaluations[-1].loss


def summary_tiles(plan: AdaptationPlan, record: RunRecord) -> Tiles:
    losses = held_out(record)
    passed = sum(check.passed for check in record.checks)
    good = passed == len(record.checks) and passed > 0
    tiles = [
        Tile(
            "held-out loss",
            f"{losses[0]:.4f} → {losses[1]:.4f}",
            change(*losses),
            "good" if losses[1] < losses[0] else "bad",
        )
        if losses
        else Tile("held-out loss", "not evaluated"),
        Tile(
            "checks",
            f"{passed} of {len(record.checks)} passed",
            "after load, step 1, export",
            "good" if good else "bad",
        ),
        Tile("step", duration(record.measured_step_ms), f"predicted {duration(plan.evidence.cost.time.step_ms)}"),
        Tile(
            "peak memory a rank",
            size(record.measured_peak_bytes),
            f"predicted {size(plan.evidence.cost.memory.peak_bytes)}",
        ),
    ]
    return Tiles(tuple(tiles))


def measured_section(plan: AdaptationPlan, record: RunRecord) -> Document:
    cost = plan.evidence.cost
    memory, time = cost.memory, cost.time
    rows = (
        (
            "optimizer step",
            duration(time.step_ms),
            duration(record.measured_step_ms),
            off_by(time.step_ms, record.measured_step_ms),
        ),
        (
            "peak memory a rank",
            size(memory.peak_bytes),
            size(record.measured_peak_bytes),
            off_by(memory.peak_bytes, record.measured_peak_bytes),
        ),
    )
    alive = [(c.name, float(c.bytes)) for c in memory.components if memory.peak_moment in c.moments]
    alive.sort(key=lambda item: -item[1])
    visible = [(c.name, c.milliseconds) for c in time.components if c.kind != "hidden_communication"]
    visible.sort(key=lambda item: -item[1])
    budget = (f"budget {size(memory.budget_bytes)}", float(memory.budget_bytes))
    return (
        Heading("Predicted beside measured"),
        Table(("", "predicted", "measured", "prediction off by"), rows, numeric=(1, 2, 3)),
        Figure(
            svg.bars(
                ("predicted", alive, size(memory.peak_bytes)),
                _measured(record.measured_peak_bytes, size(record.measured_peak_bytes)),
                budget,
                "Peak memory a rank, predicted by term and measured",
            ),
            "Peak memory of the fullest rank.",
        ),
        Figure(
            svg.bars(
                ("predicted", visible, duration(time.step_ms)),
                _measured(record.measured_step_ms, duration(record.measured_step_ms)),
                None,
                "Step time, predicted by term and measured",
            ),
            "Time of one optimizer step.",
        ),
    )


def _measured(value: float | None, text: str) -> svg.Row | None:
    return ("measured", [("measured", float(value))], text) if value else None


def loss_section(record: RunRecord) -> Document:
    train = [(float(step.step), step.loss) for step in record.steps]
    held = [(float(item.step), item.loss) for item in sorted(record.evaluations, key=lambda item: item.step)]
    rows = tuple(
        (
            str(s.step),
            f"{s.loss:.6g}",
            f"{s.grad_norm:.4g}",
            f"{s.learning_rate:.4g}",
            f"{s.tokens:,}",
            duration(s.seconds * 1000),
        )
        for s in record.steps
    )
    evaluations = tuple((str(int(step)), f"{loss:.6g}") for step, loss in held)
    blocks: list[Block] = [
        Heading("Loss"),
        Figure(
            svg.loss_curve(train, held),
            "Line with dots: training loss of each step. Squares: held-out loss; step 0 is the base model.",
        ),
        Table(("step", "held-out loss"), evaluations, numeric=(0, 1)),
        Table(
            ("step", "loss", "gradient norm", "learning rate", "tokens", "time"),
            rows,
            numeric=(0, 1, 2, 3, 4, 5),
            caption="Every optimizer step",
            folded=True,
        ),
    ]
    if record.resumed_from_steps:
        steps = ", ".join(map(str, record.resumed_from_steps))
        blocks.append(Text(f"The run was interrupted and went on from step {steps}."))
    return tuple(blocks)
