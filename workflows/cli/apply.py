"""``shardwright apply``: execute an approved plan, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import (
    DataRootOption,
    LaunchOption,
    Output,
    OutputOption,
    PlanArgument,
    PreflightOption,
    ReportsOption,
    TimeLimitOption,
    limits_of,
    note,
)


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
    launch: LaunchOption = None,
    preflight: PreflightOption = False,
    time_limit: TimeLimitOption = None,
    carry_from: Annotated[
        Path | None,
        typer.Option("--from", help="Go on from the newest save of this run, made on another mesh by the same recipe."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; start nothing.")] = False,
    require_other_approver: Annotated[
        bool,
        typer.Option("--require-other-approver", help="Refuse a plan that only those who edited it have approved."),
    ] = False,
    approvals_head: Annotated[
        str | None,
        typer.Option(
            "--approvals-head", metavar="SHA256", help="Refuse an approvals log without this line: its head, once."
        ),
    ] = None,
    output: OutputOption = Output.text,
    reports: ReportsOption = None,
) -> None:
    """Train, check and export what the plan says. Refuses a plan that is unapproved, edited or stale.

    The same command goes on after an interruption.
    """
    from shardwright.schemas.errors import RunError
    from shardwright.workflows.approvals import log_beside
    from shardwright.workflows.cli.finish import finishing
    from shardwright.workflows.cli.launching import keep_options, show_job
    from shardwright.workflows.drive import drive
    from shardwright.workflows.prepare import approved_start

    with finishing(output, reports) as run:
        limits, log = limits_of(time_limit), approvals or log_beside(plan)
        prepared = approved_start(plan, checkpoint, log, data_root, run_dir, require_other_approver, approvals_head)
        keep_options(prepared.run_dir, launch, preflight)
        if dry_run:
            show_job(prepared.run_dir, checkpoint, Path(prepared.request.data_root))
            return
        if carry_from is not None:
            from shardwright.runtime.state_adopt import adopt

            if not carry_from.is_dir():
                raise RunError("no-run", "no such folder", where=str(carry_from), next_action="name a run with --from")
            note(adopt(carry_from, prepared.run_dir))
        listener = run.begin(prepared.run_dir)
        drive(prepared.request, prepared.run_dir, listener=listener, start=prepared.state, limits=limits)
