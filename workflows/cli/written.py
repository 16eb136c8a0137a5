"""``shardwright kernels write|approve``: a kernel that a language model writes, and the person who lets it be used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.workflows.advice import Advice
from shardwright.workflows.cli.common import (
    LlmConfigOption,
    LlmLimitOption,
    LlmModelOption,
    LlmReplayOption,
    LlmUrlOption,
    OfflineOption,
    facts,
    note,
    put,
)


def register(app: typer.Typer) -> None:
    app.command()(write)
    app.command()(approve)


def write(
    plan: Annotated[Path, typer.Argument(metavar="RUN_OR_PLAN", help="A plan file, or the folder of a run.")],
    region: Annotated[str, typer.Option("--region", help="Proposal without a kernel, by its id in the plan.")],
    policy: Annotated[Path, typer.Option("--policy", help="Policy that must say `allow_written_kernels: true`.")],
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Folder of the checkpoint. [default: the run's]")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the candidates.")] = Path("written-kernels"),
    llm_url: LlmUrlOption = "",
    llm_model: LlmModelOption = "",
    llm_replay: LlmReplayOption = None,
    llm_config: LlmConfigOption = None,
    llm_limit: LlmLimitOption = None,
    offline: OfflineOption = False,
) -> None:
    """Compile a region; then let a language model write a Triton kernel for it, under a policy.

    The kernel runs apart, without network; it is kept only where it is right on shapes and values that its author
    never saw, exits 9 otherwise. Nothing uses it: a person reads it and approves its hash.
    """
    from shardwright.schemas.plan import load_plan
    from shardwright.workflows.advising import llm_request
    from shardwright.workflows.llm_options import llm_options
    from shardwright.workflows.policy import load_policy
    from shardwright.workflows.writing import (
        checkpoint_of,
        demand_fingerprint,
        demand_policy,
        writable,
        write_for_region,
    )

    demand_policy(load_policy(policy), str(policy))
    file = plan / "plan.json" if plan.is_dir() else plan
    made = load_plan(file)
    writable(made, region)
    folder = checkpoint_of(file, checkpoint)
    demand_fingerprint(made, folder)
    options = llm_options(llm_config, llm_limit or ())
    asked, _ = llm_request(
        Advice.required, url=llm_url, model=llm_model, replay=llm_replay, offline=offline, options=options
    )
    assert asked is not None, "a required model is named, or an error says why not"
    written = write_for_region(made, folder, region, asked, out, note)
    candidate = written.candidate
    rows = [("kernel", str(written.path.with_suffix(".py"))), ("sha256", candidate.source_sha256)]
    rows += [("judged", candidate.judged), ("written by", f"{candidate.model}, attempt {written.attempts}")]
    rows += [("spent", ", ".join(written.spent)), ("torch.compile", f"{written.compiled.ms:.4g} ms")]
    rows += [("kernel's time", "not measured on a CPU" if candidate.ms is None else f"{candidate.ms:.4g} ms")]
    put(facts(rows))
    note(f"next: read it, then shardwright kernels approve {written.path} --sha256 {candidate.source_sha256}")


def approve(
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE", help="Record of a written kernel, *.json.")],
    sha256: Annotated[str, typer.Option("--sha256", help="Hash of the source that you have read, all 64 digits.")],
    actor: Annotated[str | None, typer.Option("--actor", help="Who decides. [default: your user name]")] = None,
) -> None:
    """Approve one written kernel by the hash of its source. An edit of the source ends the approval."""
    from shardwright.agents.llm.kernel_writer.candidates import approve as approved
    from shardwright.workflows.approvals import person

    made = approved(candidate, sha256, actor or person())
    put(f"approved by {made.approved_by}: {made.source_sha256[:16]}… for {made.region}")
