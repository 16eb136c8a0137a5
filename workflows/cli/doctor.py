"""``shardwright doctor``: what this machine can run."""

from __future__ import annotations

import typer

from shardwright.workflows.cli.common import PlainOutput, PlainOutputOption, put, put_json


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(output: PlainOutputOption = PlainOutput.text) -> None:
    """Look for devices, libraries, back ends, compilers and memory; each with what its absence means."""
    from shardwright.workflows.machine import examine

    findings = examine()
    if output is PlainOutput.json:
        put_json([finding.model_dump() for finding in findings])
        return
    if output is PlainOutput.markdown:
        from shardwright.workflows.report.blocks import Table
        from shardwright.workflows.report.markdown import render

        rows = tuple((f.name, f.status, f.found, f.effect) for f in findings)
        put(render((Table(("", "status", "found", "what it means"), rows),)))
        return
    for finding in findings:
        mark = {"ok": "✓", "missing": "✗", "limited": "!"}[finding.status]
        put(f"{mark} {finding.status:<8} {finding.name:<18} {finding.found}")
        put(f"{'':<26}{finding.effect}")
