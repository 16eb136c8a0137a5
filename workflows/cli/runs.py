"""``shardwright status|logs|resume|cancel``: a run that is going on, paused or dead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import (
    HeadlessOption,
    Output,
    OutputOption,
    PlainOutput,
    PlainOutputOption,
    PolicyOption,
    RunArgument,
    TimeLimitOption,
    limits_of,
    note,
    put,
    put_facts,
    put_json,
)


def register(app: typer.Typer) -> None:
    for command in (status, logs, resume, cancel):
        app.command()(command)


def status(run_dir: RunArgument, output: PlainOutputOption = PlainOutput.text) -> None:
    """Show where a run stands: nodes, training step, what it waits for."""
    from shardwright.workflows.watching import run_status

    found = run_status(run_dir)
    if output is PlainOutput.json:
        put_json(found.model_dump(mode="json"))
        return
    rows = [("run", found.name), ("state", found.state)]
    rows += [(f"  {node.name}", node.state) for node in found.nodes]
    if found.engine:
        rows.append(("engine", found.engine))
    if found.step is not None:
        rows.append(("training", f"step {found.step} of {found.steps}, loss {found.loss:.4f}"))
        rows.append(("speed", f"{found.tokens_per_s:,.0f} tokens/s"))
    if found.memory_bytes is not None:
        predicted = "" if found.predicted_bytes is None else f", predicted {found.predicted_bytes / 2**30:.2f} GiB"
        rows.append(("memory", f"{found.memory_bytes / 2**30:.2f} GiB a rank{predicted}"))
    if found.last_save is not None:
        rows.append(("last save", f"step {found.last_save}"))
    rows += [("warning", text) for text in found.warnings]
    if found.next_command:
        rows.append(("next", found.next_command))
    put_facts(rows, output)


def logs(
    run_dir: RunArgument,
    workers: Annotated[bool, typer.Option("--workers", help="The workers' own logs in place of the events.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="At most so many last lines a file.")] = 200,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with every new line until the run lets go, or Ctrl-C.")
    ] = False,
) -> None:
    """Print a run's events and training steps, or its workers' logs."""
    from shardwright.workflows.following import follow as follow_lines
    from shardwright.workflows.watching import event_lines, worker_logs

    if follow:
        for line in follow_lines(run_dir, lines, workers=workers):
            put(line)
        return
    if not workers:
        for line in event_lines(run_dir)[-lines:]:
            put(line)
        return
    for path, text in worker_logs(run_dir, lines):
        put(f"== {path.relative_to(run_dir)} ==")
        put(text)


def resume(
    run_dir: RunArgument,
    headless: HeadlessOption = False,
    policy: PolicyOption = None,
    time_limit: TimeLimitOption = None,
    output: OutputOption = Output.text,
) -> None:
    """Go on with a run that was interrupted, killed, or paused for review."""
    from shardwright.schemas.errors import UsageError
    from shardwright.workflows.cli.finish import deciders, finishing
    from shardwright.workflows.drive import drive
    from shardwright.workflows.prepare import recorded_start
    from shardwright.workflows.request import load_request

    with finishing(output) as run:
        limits = limits_of(time_limit)
        rules, reviewer = deciders(headless, policy)
        request = load_request(run_dir)
        if request.goal == "plan":
            raise UsageError(
                "not-a-run", "this folder only made a plan", where=str(run_dir), next_action="use `shardwright apply`"
            )
        listener = run.begin(run_dir)
        start = recorded_start(run_dir, request)
        drive(request, run_dir, listener=listener, policy=rules, reviewer=reviewer, start=start, limits=limits)


def cancel(
    run_dir: RunArgument,
    timeout: Annotated[int, typer.Option("--timeout", min=1, help="Seconds to wait for the run to stop.")] = 60,
) -> None:
    """Stop a run that is going on; it can be resumed."""
    from shardwright.runtime.launch.engines import cancel as cancel_job
    from shardwright.workflows.watching import interrupt_run

    if (asked := cancel_job(run_dir)) is not None:
        note(f"asked {asked} to stop; its workers save first")
    pid = interrupt_run(run_dir, timeout)
    note(
        "nothing is going on here" if pid is None else f"stopped process {pid}; `shardwright resume {run_dir}` goes on"
    )
    if pid is not None:
        put(str(Path(run_dir)))
