"""``shardwright adapt``: the whole flow, from a checkpoint to a verified adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import (
    DEFAULT_TRIALS,
    CheckpointArgument,
    ClusterOption,
    HeadlessOption,
    LaunchOption,
    Output,
    OutputOption,
    PolicyOption,
    PreflightOption,
    RecipeOption,
    ReportsOption,
    TrialsOption,
)


def register(app: typer.Typer) -> None:
    app.command()(adapt)


def adapt(
    checkpoint: CheckpointArgument,
    cluster: ClusterOption,
    recipe: RecipeOption,
    headless: HeadlessOption = False,
    policy: PolicyOption = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of the run. [default: runs/NAME-HASH of the inputs]")
    ] = None,
    trials: TrialsOption = DEFAULT_TRIALS,
    launch: LaunchOption = None,
    preflight: PreflightOption = False,
    output: OutputOption = Output.text,
    reports: ReportsOption = None,
) -> None:
    """Plan, review, train, check, export, report.

    Pauses for review (exit 3 off a terminal), or lets a policy decide with --headless --policy. Interrupted or killed,
    the same command goes on from where it was.
    """
    from shardwright.workflows.cli.finish import deciders, finishing
    from shardwright.workflows.cli.launching import keep_options
    from shardwright.workflows.drive import drive
    from shardwright.workflows.prepare import fresh_request
    from shardwright.workflows.request import default_run_dir

    rules, reviewer = deciders(headless, policy)
    request = fresh_request("adapt", checkpoint, cluster, recipe, trials)
    folder = run_dir or default_run_dir(request)
    keep_options(folder, launch, preflight)
    with finishing(folder, output, reports) as listener:
        drive(request, folder, listener=listener, policy=rules, reviewer=reviewer)
