"""What a report says about a run: the result first, then predicted beside measured, checks, the adapter."""

from __future__ import annotations

from shardwright.schemas.approval import Approval
from shardwright.schemas.canonical import canonical_bytes
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import RunRecord
from shardwright.schemas.words import plural
from shardwright.workflows.report import svg
from shardwright.workflows.report.blocks import Block, Code, Document, Figure, Heading, Table, Text, Tile, Tiles
from shardwright.workflows.report.plan_content import plan_document
from shardwright.workflows.report.units import change, count, duration, off_by, size


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


def check_section(record: RunRecord) -> Document:
    rows = tuple(
        (c.stage, c.name, "✓ passed" if c.passed else "✗ failed", c.scope.replace("_", " "), c.evidence)
        for c in record.checks
    )
    return (Heading("Checks"), Table(("after", "check", "result", "scope", "evidence"), rows, prose=4))


def preflight_section(record: RunRecord) -> Document:
    """What the machines were like before the run; nothing where no preflight was asked for."""
    if not record.preflight:
        return ()
    rows = tuple(
        (one.name, "✓ passed" if one.passed else "✗ failed", one.where, one.evidence) for one in record.preflight
    )
    return (Heading("Preflight"), Table(("test", "result", "where", "evidence"), rows, prose=3))


def ways_section(record: RunRecord) -> Document:
    """Which way operators with several ran, beside what the plan said; nothing where none is installed."""
    if not record.ways:
        return ()
    rows = tuple(
        (one.op, str(len(one.modules)), count(one.row_tokens), one.path, f"{one.reason}. Planned: {one.planned}")
        for one in record.ways
    )
    return (
        Heading("Ways taken"),
        Table(("operator", "modules", "tokens a row", "ran", "because"), rows, numeric=(1, 2), prose=4),
    )


def adapter_section(plan: AdaptationPlan, record: RunRecord) -> Document:
    adapter = record.adapter
    if adapter is None:
        return (Heading("Adapter"), Text("Nothing was exported."))
    load = (
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n\n"
        'base = AutoModelForCausalLM.from_pretrained("CHECKPOINT")\n'
        'model = PeftModel.from_pretrained(base, "ADAPTER")'
    )
    return (
        Heading("Adapter"),
        Table(
            ("", ""),
            (
                ("path", f"`{adapter.path}`"),
                ("content", f"{plural(adapter.tensors, 'tensor')}, {size(adapter.bytes)}, {adapter.format}"),
                ("sha256", f"`{adapter.sha256}`"),
            ),
        ),
        Text("Load it with PEFT; `CHECKPOINT` is the checkpoint's folder, `ADAPTER` the path above:"),
        Code(load, "python"),
        Text("Or see both answers to a prompt:"),
        Code(f"shardwright generate CHECKPOINT --adapter ADAPTER --prompt {plan.decision.recipe.prompt!r}", "sh"),
    )


def approval_section(approval: Approval | None) -> Document:
    if approval is None:
        return ()
    rows = [("by", f"{approval.actor} ({approval.actor_kind})")]
    if approval.policy_sha256 is not None:
        rows.append(("policy", f"`{approval.policy_sha256}`"))
    if approval.reason:
        rows.append(("reason", approval.reason))
    rows.append(("fusions decided", ", ".join(f"`{v.proposal_id}`" for v in approval.proposals) or "none"))
    return (Heading("Approval"), Table(("", ""), tuple(rows)))


def load_section(record: RunRecord) -> Document:
    versions = ", ".join(f"{k} {v}" for k, v in sorted(record.versions.items()))
    rows = [("device", record.device), ("ranks", str(record.world_size)), ("versions", versions)]
    if record.load is not None:
        read = f"{size(record.load.bytes_read)} in {record.load.seconds:.3g} s, {count(record.load.tensors)} tensors"
        by = f"{plural(record.load.readers, 'reading thread')} a rank, buffers of {size(record.load.staging_bytes)}"
        ahead = f", {by}" if record.load.readers else ""
        rows.append(("weights read", f"{read}{ahead}, peak host memory {size(record.load.peak_host_bytes)}"))
    blocks: list[Block] = [Heading("The run"), Table(("", ""), tuple(rows))]
    loads = tuple(
        (
            load.layer,
            f"{max(load.tokens) / (sum(load.tokens) / len(load.tokens)):.2f}",
            ", ".join(f"{n:,}" for n in load.tokens[:64]),
        )
        for load in record.expert_loads
        if load.tokens and sum(load.tokens)
    )
    if loads:
        blocks.append(
            Table(
                ("layer", "largest ÷ mean", "tokens of each expert"),
                loads,
                numeric=(1,),
                caption="Load of the experts",
                folded=True,
            )
        )
    return tuple(blocks)
