"""Options that several verbs share, and how results reach stdout."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Output(StrEnum):
    """Forms of a result on stdout."""

    text = "text"
    json = "json"
    markdown = "markdown"
    junit = "junit"
    sarif = "sarif"


class PlainOutput(StrEnum):
    """Forms of a result where there is nothing to test."""

    text = "text"
    json = "json"
    markdown = "markdown"


CheckpointArgument = Annotated[Path, typer.Argument(metavar="CKPT", help="Folder of a safetensors checkpoint.")]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")]
ClusterOption = Annotated[
    str, typer.Option("--cluster", "-c", help="A name from the catalogue (cpu-2, h200-8, ...) or a cluster file.")
]
RecipeOption = Annotated[Path, typer.Option("--recipe", "-r", help="What to train: a recipe file.")]
TrialsOption = Annotated[int, typer.Option("--trials", min=1, help="Trials of the strategy search.")]
OutputOption = Annotated[Output, typer.Option("--output", help="Form of the result on stdout.")]
PlainOutputOption = Annotated[PlainOutput, typer.Option("--output", help="Form of the result on stdout.")]
HeadlessOption = Annotated[bool, typer.Option("--headless", help="Ask nobody: the policy decides.")]
PolicyOption = Annotated[Path | None, typer.Option("--policy", help="Policy file that decides when headless.")]
DataRootOption = Annotated[
    Path | None, typer.Option("--data-root", help="Folder of the data files. [default: found by hash]")
]

LaunchOption = Annotated[
    str | None,
    typer.Option("--launch", help="Engine (local, slurm, ray, kubernetes, skypilot) or a YAML file. [default: local]"),
]
PreflightOption = Annotated[
    bool, typer.Option("--preflight", help="Test network, devices, clocks and disks on all ranks before the run.")
]

ReportsOption = Annotated[
    Path | None,
    typer.Option("--reports", help="Folder for result.json, summary.md, junit.xml and results.sarif, however it ends."),
]

DEFAULT_TRIALS = 64


def put(text: str) -> None:
    """Write a result to stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def put_json(value: Any) -> None:
    """Write a value to stdout as sorted JSON."""
    put(json_text(value))


def json_text(value: Any) -> str:
    """A value as sorted JSON."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def note(text: str) -> None:
    """Write progress to stderr."""
    sys.stderr.write(text + "\n")


def facts(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
