"""``shardwright export|generate``: an adapter again from a finished run, and what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.cli.common import (
    CheckpointArgument,
    PlainOutput,
    PlainOutputOption,
    RunArgument,
    facts,
    put,
    put_json,
)


def register(app: typer.Typer) -> None:
    for command in (export, generate):
        app.command()(command)


def export(run_dir: RunArgument, output: PlainOutputOption = PlainOutput.text) -> None:
    """Write a trained run's PEFT adapter again and prove that it loads."""
    from shardwright.schemas.plan import load_plan
    from shardwright.workflows.lock import RunLock
    from shardwright.workflows.request import load_request
    from shardwright.workflows.runs import demand, finish_record
    from shardwright.workflows.stages import Stages

    request, stages = load_request(run_dir), Stages()
    plan = load_plan(run_dir / "plan.json")
    with RunLock(run_dir):
        adapter = stages.export(run_dir, Path(request.checkpoint))
        checks = stages.check_adapter(run_dir, Path(request.checkpoint))
        record = finish_record(run_dir, plan, adapter, checks)
    demand(record.checks, ("export",), where=adapter.path)
    if output is PlainOutput.json:
        put_json(adapter.model_dump(mode="json"))
    else:
        put(facts([("adapter", adapter.path), ("sha256", adapter.sha256), ("tensors", str(adapter.tensors))]))


def generate(
    checkpoint: CheckpointArgument,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="Folder of a PEFT adapter.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="[default: the run's recipe, or 'def ']")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Length of the answer.")] = 48,
    output: PlainOutputOption = PlainOutput.text,
) -> None:
    """Show the base's answer to a prompt and, with --adapter, the adapter's beside it."""
    from shardwright.runtime.generate import generate as answer
    from shardwright.schemas.plan import load_plan

    if prompt is None:
        plan_file = adapter.resolve().parent / "plan.json" if adapter is not None else None
        prompt = (
            load_plan(plan_file).decision.recipe.prompt if plan_file is not None and plan_file.is_file() else "def "
        )
    answers = {"base": answer(checkpoint, None, prompt, max_new_tokens)}
    if adapter is not None:
        answers["adapter"] = answer(checkpoint, adapter, prompt, max_new_tokens)
    if output is PlainOutput.json:
        put_json({"prompt": prompt, **answers})
        return
    put(f"--- prompt ---\n{prompt}")
    for name, text in answers.items():
        put(f"--- {name} ---\n{text}")
