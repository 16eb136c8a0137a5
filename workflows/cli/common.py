"""Options that several verbs share, and how results reach stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.runtime.launch.registry import NAMES as ENGINES
from shardwright.workflows.advice import Advice


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


class Words(StrEnum):
    """Forms of an explanation."""

    text = "text"
    markdown = "markdown"


CheckpointArgument = Annotated[Path, typer.Argument(metavar="CKPT", help="Folder of a safetensors checkpoint.")]
CheckpointOrAddress = Annotated[
    Path,
    typer.Argument(metavar="CKPT", help="Folder of a safetensors checkpoint, or hf://org/model@revision (headers)."),
]
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Ask no other machine: no hub address, no language model.")
]
AdviceOption = Annotated[
    Advice, typer.Option("--llm", help="Whether a language model may advise; required exits 8 where none answers.")
]
LlmUrlOption = Annotated[
    str, typer.Option("--llm-url", help="OpenAI-compatible server. [default: SHARDWRIGHT_LLM_URL]")
]
LlmModelOption = Annotated[str, typer.Option("--llm-model", help="Its model's name. [default: SHARDWRIGHT_LLM_MODEL]")]
LlmReplayOption = Annotated[
    Path | None, typer.Option("--llm-replay", help="Play a run's llm.jsonl again in place of asking.")
]
LlmConfigOption = Annotated[
    Path | None, typer.Option("--llm-config", help="YAML file: address, model, budgets and prices.")
]
LlmLimitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--llm-limit", metavar="NAME=VALUE", help="A budget or price: calls, tokens, seconds, money, price_in, ..."
    ),
]
CalibrationOption = Annotated[
    Path | None, typer.Option("--calibration", help="Measured curves, from `shardwright calibrate`.")
]
LoadProfileOption = Annotated[
    Path | None, typer.Option("--load-profile", help="A run whose expert loads place the experts.")
]
EvidenceOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--evidence",
        metavar="FILE",
        help="Your own times, from `shardwright kernels bench --evidence`; repeatable, the last goes first.",
    ),
]
TimeBudgetOption = Annotated[
    float | None, typer.Option("--time-budget", min=0.1, help="Seconds after which the search begins no trial.")
]
TimeLimitOption = Annotated[
    list[str] | None,
    typer.Option("--time-limit", metavar="NODE=SECONDS", help="Longest time of a node, such as structure=600."),
]
TrustOption = Annotated[
    str | None,
    typer.Option(
        "--trust-remote-code", metavar="SHA256", help="Run the checkpoint's own modelling code, if it has this hash."
    ),
]
NoCacheOption = Annotated[
    bool, typer.Option("--no-cache", help="Parse the checkpoint even if this machine has parsed it before.")
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")]


def known_clusters(incomplete: str) -> list[str]:
    """Names of the catalogue that begin so; for the shell's completion."""
    from shardwright.search_spaces.catalogue import HARDWARE

    return sorted(path.stem for path in HARDWARE.glob("*.yaml") if path.stem.startswith(incomplete))


ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        autocompletion=known_clusters,
        help="A name from the catalogue (cpu-2, h200-8, ...) or a cluster file.",
    ),
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
    typer.Option("--launch", help=f"Engine ({', '.join(ENGINES)}) or a YAML file. [default: local]"),
]
PreflightOption = Annotated[
    bool, typer.Option("--preflight", help="Test network, devices, clocks and disks on all ranks before the run.")
]

ReportsOption = Annotated[
    Path | None,
    typer.Option("--reports", help="Folder for result.json, summary.md, junit.xml and results.sarif, however it ends."),
]

DEFAULT_TRIALS = 64


def demand_place(file: Path) -> None:
    """A file can be written there: asked before the work whose result it gets.

    Raises:
        UsageError: ``not-a-file``.
        OSError: the folder, or the nearest one that is there, may not be written.
    """
    import errno
    import os

    from shardwright.schemas.errors import UsageError

    if file.is_dir():
        raise UsageError("not-a-file", "this is a folder", where=str(file), next_action="name a file in it")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        number = errno.EACCES if folder.is_dir() else errno.ENOTDIR
        raise OSError(number, os.strerror(number), str(folder))


@dataclass
class Stdout:
    """What this command has done with stdout."""

    used: bool = False


STDOUT = Stdout()


def put(text: str) -> None:
    """Write a result to stdout."""
    STDOUT.used = True
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


def limits_of(words: list[str] | None) -> dict[str, float]:
    """The time limits of ``--time-limit`` over the defaults."""
    from shardwright.workflows.adapt import NODES
    from shardwright.workflows.limits import parse_limits

    return parse_limits(words or (), tuple(NODES))


def facts(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def put_facts(rows: list[tuple[str, str]], output: PlainOutput) -> None:
    """Write two columns to stdout, as text or as a Markdown table."""
    if output is not PlainOutput.markdown:
        put(facts(rows))
        return
    from shardwright.workflows.report.blocks import Table
    from shardwright.workflows.report.markdown import render

    put(render((Table(("", ""), tuple((name.strip(), value) for name, value in rows)),)))
