"""``shardwright plan``: the agents run, the plan is saved, nothing is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import (
    DEFAULT_TRIALS,
    CheckpointArgument,
    ClusterOption,
    PlainOutput,
    PlainOutputOption,
    RecipeOption,
    TrialsOption,
    note,
    put,
)


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    checkpoint: CheckpointArgument,
    cluster: ClusterOption,
    recipe: RecipeOption,
    out: Annotated[Path, typer.Option("--out", "-o", help="Plan file to write.")] = Path("plan.json"),
    trials: TrialsOption = DEFAULT_TRIALS,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", help="Measured curves, from `shardwright calibrate`.")
    ] = None,
    load_profile: Annotated[
        Path | None, typer.Option("--load-profile", help="A run whose expert loads place the experts.")
    ] = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="Also consider what the runtime does not run; apply refuses such a plan.")
    ] = False,
    time_budget: Annotated[
        float | None, typer.Option("--time-budget", min=0.1, help="Seconds after which the study begins no trial.")
    ] = None,
    output: PlainOutputOption = PlainOutput.text,
) -> None:
    """Make a plan: structure, fusions, strategy search. The same input gives the same bytes."""
    import tempfile

    from shardwright.workflows.cli.progress import Progress
    from shardwright.workflows.drive import drive
    from shardwright.workflows.prepare import fresh_request
    from shardwright.workflows.review.terminal import plan_text
    from shardwright.workflows.search_options import SearchOptions, stages_with, with_calibration

    options = SearchOptions.read(calibration, load_profile, explore, time_budget)
    request = fresh_request("plan", checkpoint, cluster, recipe, trials)
    with tempfile.TemporaryDirectory(prefix="shardwright-plan-") as folder:
        outcome = drive(request, Path(folder), stages=stages_with(options), listener=Progress())
    made = with_calibration(outcome.plan, options.calibration)
    made.save(out)
    note(f"wrote {out}")
    if output is PlainOutput.json:
        put(made.to_bytes().decode())
    elif output is PlainOutput.markdown:
        from shardwright.workflows.report.markdown import markdown_plan

        put(markdown_plan(made))
    else:
        put(plan_text(made))
        note(f"next: shardwright review {out}")
