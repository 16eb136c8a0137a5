"""``shardwright profile|simulate``: a step's timeline, and a rank of a world that is not here, beside the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.schemas.words import plural
from shardwright.workflows.cli.common import PlainOutput, PlainOutputOption, PlanArgument, RunArgument, put, put_json


def register(app: typer.Typer) -> None:
    for command in (profile, simulate):
        app.command()(command)


def profile(run_dir: RunArgument, output: PlainOutputOption = PlainOutput.text) -> None:
    """Show where a step's time went, in the cost model's own terms, beside what the plan predicted.

    Run with SHARDWRIGHT_PROFILE_STEP=N in the environment: rank 0 then keeps the timeline of step N.
    """
    from shardwright.runtime.profile import terms
    from shardwright.schemas.plan import load_plan
    from shardwright.workflows.report.units import duration
    from shardwright.workflows.request import require_run

    require_run(run_dir)
    measured = terms(run_dir)
    time = load_plan(run_dir / "plan.json").evidence.cost.time
    predicted = {kind: sum(c.milliseconds for c in time.components if c.kind == kind) for kind in measured}
    predicted["step"] = time.step_ms
    if output is PlainOutput.json:
        put_json({"predicted_ms": predicted, "measured_ms": measured})
        return
    rows = tuple((kind.replace("_", " "), duration(predicted[kind]), duration(measured[kind])) for kind in measured)
    _put(("", "predicted", "measured"), rows, output)


def simulate(
    plan: PlanArgument,
    checkpoint: Annotated[
        Path, typer.Option("--checkpoint", help="Folder of the checkpoint; only its config is read.")
    ],
    simulate_world: Annotated[
        int | None, typer.Option("--simulate-world", min=1, help="Number of ranks. [default: the plan's]")
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="Only the first so many layers: no comparison with the plan.")
    ] = None,
    output: PlainOutputOption = PlainOutput.text,
) -> None:
    """Run rank 0 of the plan's world on a fake process group and compare its memory with the plan's.

    No device, weight or other rank is needed: FSDP2's own tracker counts what the rank keeps and gathers.
    """
    from shardwright.runtime.simulate import simulate as run
    from shardwright.schemas.errors import UsageError
    from shardwright.schemas.plan import load_plan
    from shardwright.workflows.checkpoint_folders import checkpoint_folder
    from shardwright.workflows.report.units import size

    made = load_plan(plan)
    decision, world = made.decision, made.decision.strategy.mesh.world_size
    if simulate_world not in (None, world):
        raise UsageError(
            "other-world",
            f"the plan is for {plural(world, 'rank')}, --simulate-world asks for {simulate_world}",
            where=str(plan),
            next_action=f"leave the option out, or plan for a cluster of {simulate_world}",
        )
    found = run(checkpoint_folder(checkpoint), decision.recipe, decision.strategy, decision.lora_targets, layers=layers)
    terms = {component.name: component.bytes for component in made.evidence.cost.memory.components}
    static = terms.get("frozen_base", 0) + terms.get("adapter_parameters", 0)
    once = terms.get("gather_buffers", 0)
    root = terms.get("gathered_root", 0)
    least = root + once // 2
    most = root + once + max(terms.get("gather_staging", 0), root)
    if output is PlainOutput.json:
        put_json(
            {
                "world": world,
                "kept_bytes": found.sharded,
                "gathered_bytes": found.gathered,
                "by_kind": found.by_kind,
                "predicted": {} if layers else {"kept": static, "gathered_least": least, "gathered_most": most},
            }
        )
        return
    gathered = size(most) if least == most else f"{size(least)} to {size(most)}"
    rows = (
        ("base and adapters kept", "–" if layers else size(static), size(found.sharded)),
        ("gathered at once, at most", "–" if layers else gathered, size(found.gathered)),
    )
    _put((f"rank 0 of {world}", "plan", "simulated"), rows, output)


def _put(headers: tuple[str, ...], rows: tuple[tuple[str, ...], ...], output: PlainOutput) -> None:
    from shardwright.workflows.report.blocks import Table
    from shardwright.workflows.report.markdown import render
    from shardwright.workflows.review.terminal import document_text

    document = (Table(headers, rows, numeric=(1, 2)),)
    put(render(document) if output is PlainOutput.markdown else document_text(document))
