"""``shardwright export|generate``: an adapter again from a finished run, and what it says."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import (
    CheckpointArgument,
    PlainOutput,
    PlainOutputOption,
    RunArgument,
    put,
    put_facts,
    put_json,
)


def register(app: typer.Typer) -> None:
    for command in (export, generate):
        app.command()(command)


class Format(StrEnum):
    """Forms of an adapter."""

    peft = "peft"
    per_expert = "per-expert"
    merged = "merged"


def export(
    run_dir: RunArgument,
    form: Annotated[
        Format,
        typer.Option(
            "--format", help="PEFT; one pair a published weight, for vLLM and SGLang; or a merged checkpoint."
        ),
    ] = Format.peft,
    output: PlainOutputOption = PlainOutput.text,
) -> None:
    """Write a trained run's adapter again, in any form, and prove that it loads."""
    if form is not Format.peft:
        _export_other(run_dir, form, output)
        return
    from shardwright.schemas.plan import load_plan
    from shardwright.workflows.lock import RunLock
    from shardwright.workflows.remote_code import isolated
    from shardwright.workflows.request import load_request
    from shardwright.workflows.runs import demand, finish_record
    from shardwright.workflows.stages import Stages

    request = load_request(run_dir)
    stages = isolated(Stages(), Path(request.checkpoint), request.trust_remote_code)
    plan = load_plan(run_dir / "plan.json")
    with RunLock(run_dir):
        adapter = stages.export(run_dir, Path(request.checkpoint))
        checks = stages.check_adapter(run_dir, Path(request.checkpoint))
        record = finish_record(run_dir, plan, adapter, checks)
    demand(record.checks, ("export",), where=adapter.path)
    if output is PlainOutput.json:
        put_json(adapter.model_dump(mode="json"))
    else:
        rows = [("adapter", adapter.path), ("sha256", adapter.sha256), ("tensors", str(adapter.tensors))]
        put_facts(rows, output)


def _export_other(run_dir: Path, form: Format, output: PlainOutput) -> None:
    from shardwright.runtime.checks.export_forms import check_merged, check_per_expert
    from shardwright.runtime.export.merged import export_merged
    from shardwright.runtime.export.per_expert import export_per_expert
    from shardwright.runtime.export.serving import CHECKED, recipe
    from shardwright.workflows.lock import RunLock
    from shardwright.workflows.remote_code import run_trusting
    from shardwright.workflows.request import load_request
    from shardwright.workflows.runs import demand

    request = load_request(run_dir)
    checkpoint, code, rows = Path(request.checkpoint), request.trust_remote_code, []
    with RunLock(run_dir):
        if form is Format.merged:
            facts, warnings = run_trusting(checkpoint, code, export_merged, run_dir, checkpoint)
            checks = run_trusting(checkpoint, code, check_merged, run_dir, checkpoint)
            rows += [("of the change left", f"{facts.retained_delta:.1%} in the worst weight")]
            rows += [("warning", text) for text in warnings]
        else:
            facts = run_trusting(checkpoint, code, export_per_expert, run_dir, checkpoint)
            checks = run_trusting(checkpoint, code, check_per_expert, run_dir, checkpoint)
            rows += [("names", CHECKED)]
            rows += [("serve", line) for line in recipe(checkpoint, Path(facts.path), facts_rank(Path(facts.path)))]
    if output is PlainOutput.json:
        put_json({**facts.model_dump(mode="json"), "checks": [check.model_dump(mode="json") for check in checks]})
    else:
        rows = [("written", facts.path), ("sha256", facts.sha256), ("tensors", str(facts.tensors)), *rows]
        put_facts([*rows, *((f"  {'✓' if c.passed else '✗'} {c.name}", c.evidence) for c in checks)], output)
    demand(checks, ("export",), where=facts.path)


def facts_rank(folder: Path) -> int:
    """Rank of an adapter folder."""
    import json

    return int(json.loads((folder / "adapter_config.json").read_text())["r"])


def generate(
    checkpoint: CheckpointArgument,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="Folder of a PEFT adapter.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="[default: the run's recipe, or 'def ']")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Length of the answer.")] = 48,
    output: PlainOutputOption = PlainOutput.text,
) -> None:
    """Show the base's answer to a prompt and, with --adapter, the adapter's beside it."""
    from shardwright.checkpoints.config import read_config
    from shardwright.runtime.generate import generate as answer
    from shardwright.schemas.errors import UsageError
    from shardwright.schemas.plan import load_plan
    from shardwright.workflows.checkpoint_folders import local_checkpoint
    from shardwright.workflows.remote_code import run_trusting

    if adapter is not None and not adapter.is_dir():
        raise UsageError(
            "no-adapter",
            "this is a file" if adapter.is_file() else "no such folder",
            where=str(adapter),
            next_action="name the folder of a PEFT adapter, such as RUN_DIR/adapter",
        )
    read_config(local_checkpoint(checkpoint))
    plan_file = adapter.resolve().parent / "plan.json" if adapter is not None else None
    decision = load_plan(plan_file).decision if plan_file is not None and plan_file.is_file() else None
    if prompt is None:
        prompt = "def " if decision is None else decision.recipe.prompt
    code = None if decision is None or decision.remote_code is None else decision.remote_code.sha256

    def say(folder: Path | None) -> str:
        return run_trusting(checkpoint, code, answer, checkpoint, folder, prompt, max_new_tokens)

    answers = {"base": say(None)}
    if adapter is not None:
        answers["adapter"] = say(adapter)
    if output is PlainOutput.json:
        put_json({"prompt": prompt, **answers})
        return
    said = {"prompt": prompt, **answers}
    if output is PlainOutput.markdown:
        from shardwright.workflows.report.blocks import Code, Heading
        from shardwright.workflows.report.markdown import render

        put(render(tuple(block for name, text in said.items() for block in (Heading(name, 3), Code(text)))))
        return
    for name, text in said.items():
        put(f"--- {name} ---\n{text}")
