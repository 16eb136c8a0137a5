"""Experts on a base that stays packed, from files to an adapter with the plan's own operator in their place.

The structure agent reads the packed files and decides for a GPU; a worker installs what it decided on a live model on
CPU, bf16, kernels in Triton's interpreter, and its own check runs fused beside unfused by the switch.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from shardwright.agents.structure.join import recertify
from shardwright.agents.structure.run import run_structure
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.export.peft import export_adapter
from shardwright.schemas.fusion import FusionDecision, FusionProposal
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NARROW = "H, L, F, E, LAYERS, DENSE = 64, 32, 32, 16, 5, 96"
"""Widths of tiny-k3: the operator reads two groups of 32 at once, so experts of 32 cannot stay packed."""
SHORT = {
    "precision": {"base": "bfloat16"},
    "batch": {"sequence_tokens": 16, "global_batch_sequences": 2},
    "schedule": {"steps": 1, "held_out_sequences": 1},
}
SMALL = {"micro_batch_sequences": 1, "base_format": "mxfp4"}


@pytest.fixture
def run_interpreted(on_ranks: Callable[..., str], tmp_path: Path) -> Callable[..., None]:
    """Run several jobs on the same ranks, kernels interpreted."""

    def run(ranks: int, jobs: list[Any]) -> None:
        path = tmp_path / f"jobs-{ranks}.json"
        path.write_text(json.dumps([job.flags for job in jobs]))
        on_ranks(ranks, "interpreted.py", str(path))

    return run


@pytest.fixture(scope="module")
def tiny_k3(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """examples/tiny-k3 with experts 64 wide, as whole blocks of the published widths are, and its texts alone."""
    folder = tmp_path_factory.mktemp("examples")
    for part in ("common", "tiny-k3"):
        shutil.copytree(EXAMPLES / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    builder, out = folder / "tiny-k3" / "build.py", folder / "built"
    source = builder.read_text()
    assert NARROW in source
    builder.write_text(source.replace(NARROW, NARROW.replace("64, 32, 32", "96, 64, 64")))
    for flags in (["--write-manifest"], []):
        command = [sys.executable, str(builder), "--out", str(out), *flags]
        subprocess.run(command, check=True, capture_output=True)
    for name in ("train.jsonl", "held_out.jsonl"):
        lines = [line for line in (out / name).read_text().splitlines() if not json.loads(line).get("images")]
        (out / name).write_text("\n".join(lines) + "\n")
    return type(tiny)(out / "checkpoint", out)


def proposed(checkpoint: Path, recipe: Recipe) -> tuple[FusionProposal, ...]:
    """What the agent proposes for one H200."""
    found = run_structure(checkpoint, profile_checkpoint(checkpoint), load_cluster("h200-8"), recipe)
    return tuple(one for one in found.proposals if one.pattern == "experts")


def decided(
    proposals: tuple[FusionProposal, ...], recipe: Recipe, strategy: ParallelStrategy
) -> tuple[FusionDecision, ...]:
    """The experts' operators for a mesh: packed ones, each proved."""
    _, decisions = recertify(proposals, strategy, load_cluster("h200-8"), recipe)
    assert decisions and {one.op for one in decisions} == {"packed_experts"}, [one.reason for one in decisions]
    return decisions


def close(job: Any, plain: Any, modules: int) -> None:
    """All checks of the worker passed, its own comparison among them, and a step is that of the model without."""
    checks = {one.name: one for one in job.record.checks}
    assert all(one.passed for one in checks.values()), checks
    assert checks["fusions-equal"].evidence.startswith(f"{modules} fused modules on and off")
    assert "fusions-equal" not in {one.name for one in plain.record.checks}
    assert job.losses == pytest.approx(plain.losses, rel=1e-2)
    norms = [[step.grad_norm for step in one.record.steps] for one in (job, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=3e-2) and norms[0][0] > 0


@pytest.mark.slow
def test_gpt_oss_is_trained_by_the_plans_operator(
    packed: Any, make_job: Any, strategy: Any, single_rank: Any, run_interpreted: Any
) -> None:
    """Blocks with biases, interleaved columns, a clamped gate; the rows of two ranks; the adapter is exported."""
    example = packed("blocks")
    plain = make_job(example, strategy(accumulation_steps=2, **SMALL), recipe=SHORT)
    assert single_rank(plain) == 0
    recipe, chosen = plain.plan.decision.recipe, strategy(ep=2, accumulation_steps=1, **SMALL)
    decisions = decided(proposed(example.checkpoint, recipe), recipe, chosen)
    job = make_job(example, chosen, recipe=SHORT, fusions=decisions)
    run_interpreted(2, [job])
    close(job, plain, modules=2)
    export_adapter(job.run_dir, example.checkpoint)
    assert all(one.passed for one in check_adapter(job.run_dir, example.checkpoint))


@pytest.mark.slow
def test_tiny_k3_is_trained_by_the_plans_operator(
    tiny_k3: Any, make_job: Any, strategy: Any, run_interpreted: Any, single_rank: Any
) -> None:
    """Latent experts of its own class, SiTU, the rows of two ranks.

    One layer kind keeps the operator, to spare the interpreter; the others are rejected, and stay eager.
    """
    plain = make_job(tiny_k3, strategy(accumulation_steps=2, **SMALL), recipe=SHORT)
    assert single_rank(plain) == 0
    spec, chosen = plain.plan.decision.recipe, strategy(ep=2, accumulation_steps=1, **SMALL)
    decisions = decided(proposed(tiny_k3.checkpoint, spec), spec, chosen)
    assert sum(len(one.modules) for one in decisions) == 4, "every layer with experts"
    kept = tuple(one.model_copy(update={"rejected": ":mla+moe/" not in one.proposal_id}) for one in decisions)
    job = make_job(tiny_k3, chosen, recipe=SHORT, fusions=kept)
    run_interpreted(2, [job])
    close(job, plain, modules=1)
