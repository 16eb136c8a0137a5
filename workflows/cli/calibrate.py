"""``shardwright calibrate``: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import note, put


def register(app: typer.Typer) -> None:
    app.command()(calibrate)


def calibrate(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. [default: stdout]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few small sizes: a few seconds.")] = False,
) -> None:
    """Measure matrix products, copies and launches on this machine; write a calibration as JSON."""
    from shardwright.schemas.canonical import pretty_bytes
    from shardwright.schemas.files import write_atomic
    from shardwright.workflows.calibration import measure

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)  # a place that cannot be written is said before the work
    data = pretty_bytes(measure(quick=quick, progress=note))
    if out is None:
        put(data.decode())
        return
    write_atomic(out, data)
    note(f"wrote {out}")
