"""``shardwright runs``: the runs of a folder, one run's course, and a fork of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import PlainOutput, PlainOutputOption, RunArgument, note, put, put_json

app = typer.Typer(help="List runs, show one's course, fork one.", rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def runs(
    context: typer.Context,
    root: Annotated[Path, typer.Option("--root", help="Folder that holds the runs.")] = Path("runs"),
    output: PlainOutputOption = PlainOutput.text,
) -> None:
    """List the runs of a folder with their states and next commands."""
    if context.invoked_subcommand is not None:
        return
    from shardwright.workflows.history import runs_in
    from shardwright.workflows.watching import RunStatus

    given = context.get_parameter_source("root")
    fresh = given is not None and given.name == "DEFAULT" and not root.exists()  # nothing has run here yet
    found = () if fresh else runs_in(root)
    if output is PlainOutput.json:
        rows = [s.model_dump(mode="json") if isinstance(s, RunStatus) else {"state": s} for _, s in found]
        put_json([{"run_dir": str(path), **row} for (path, _), row in zip(found, rows, strict=True)])
        return
    table = []
    for path, status in found:
        known = isinstance(status, RunStatus)
        state, following = (status.state, status.next_command) if known else (str(status), "")  # type: ignore[union-attr]
        table.append((str(path), state, following or "–"))
    _put(("run", "state", "next"), tuple(table), output, f"no run in {root}")


@app.command()
def show(run_dir: RunArgument, output: PlainOutputOption = PlainOutput.text) -> None:
    """Show every node that ran, when, how long, how it ended; restarts included."""
    from shardwright.workflows.history import visits

    found = visits(run_dir)
    if output is PlainOutput.json:
        put_json([visit.model_dump(mode="json") for visit in found])
        return
    rows = tuple((v.started, v.node, "–" if v.seconds is None else f"{v.seconds:.1f} s", v.end) for v in found)
    _put(("started", "node", "took", "end"), rows, output, "nothing has run yet")


@app.command()
def fork(
    run_dir: RunArgument,
    at: Annotated[str, typer.Option("--at", metavar="NODE", help="First node that runs again.")],
    to: Annotated[Path, typer.Option("--to", help="Folder of the fork; must not be there yet.")],
) -> None:
    """Copy a run up to a node into another folder, where it goes on from there; the first run is not touched."""
    from shardwright.workflows.history import fork as make_fork

    put(str(make_fork(run_dir, at, to)))
    note(f"next: shardwright resume {to}")


def _put(headers: tuple[str, ...], rows: tuple[tuple[str, ...], ...], output: PlainOutput, empty: str) -> None:
    from shardwright.workflows.report.blocks import Table
    from shardwright.workflows.report.markdown import render
    from shardwright.workflows.review.terminal import document_text

    if not rows:
        note(empty)
        return
    document = (Table(headers, rows),)
    put(render(document) if output is PlainOutput.markdown else document_text(document))
