"""``shardwright apply``: execute an approved plan, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import DataRootOption, Output, OutputOption, PlanArgument


def register(app: typer.Typer) -> None:
    app.command()(apply)


def apply(
    plan: PlanArgument,
    checkpoint: Annotated[Path, typer.Option("--checkpoint", help="Folder of the checkpoint that was planned for.")],
    data_root: DataRootOption = None,
    approvals: Annotated[
        Path | None, typer.Option("--approvals", help="Approvals log. [default: approvals.jsonl beside the plan]")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of the run. [default: runs/NAME-HASH]")
    ] = None,
    output: OutputOption = Output.text,
) -> None:
    """Train, check and export what the plan says. Refuses a plan that is unapproved, edited or stale.

    The same command goes on after an interruption.
    """
    from shardwright.workflows.approvals import log_beside
    from shardwright.workflows.cli.finish import finishing
    from shardwright.workflows.drive import drive
    from shardwright.workflows.prepare import approved_start

    log = approvals or log_beside(plan)
    prepared = approved_start(plan, checkpoint, log, data_root, run_dir)
    with finishing(prepared.run_dir, output) as listener:
        drive(prepared.request, prepared.run_dir, listener=listener, start=prepared.state)
