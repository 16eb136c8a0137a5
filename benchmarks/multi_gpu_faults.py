"""Kill one worker of a run on N ranks, go on with half of them, and compare with a run that nothing happened to.

Plans are sealed and approved here from the schemas alone: no search, no workflow. fp32 and a learning rate that moves
the loss.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.fingerprint import fingerprint
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.checkpoints.targets import parameter_shapes, resolve_targets
from shardwright.runtime.failure import FILE as FAILURE
from shardwright.runtime.record import read as read_record
from shardwright.runtime.record import versions
from shardwright.runtime.state_adopt import adopt
from shardwright.schemas.approval import Approval, append_to_log
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.plan import AdaptationPlan, DataPin, Decision, Evidence, Provenance, SearchRecord
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import cluster_digest, cluster_ref, load_cluster
from shardwright.search_spaces.cost import estimate

ROOT = Path(__file__).resolve().parent.parent
STEPS, SAVE_EVERY, KILLED_AFTER = 12, 2, 5
TOLERANCE = 2e-5
"""fp32: sums over ranks are added in another order after the change of mesh."""


class DrillFailed(Exception):
    """The drill did not come to its end; the text says where."""


WORDS = {1: "one", 2: "two", 4: "four"}


def drill_name(ranks: int) -> str:
    """The case of a drill on that many ranks."""
    left = max(1, ranks // 2)
    return f"kill-one-resume-on-{WORDS.get(left, str(left))}"


def mesh_of(ranks: int) -> Mesh:
    """Both kinds of sharding where the ranks allow it."""
    if ranks == 1:
        return Mesh()
    return Mesh(shard=ranks // 2, ep=2) if ranks % 2 == 0 else Mesh(shard=ranks)


def faults(work: Path, ranks: int, device_type: str, limit_s: float) -> dict[str, float]:
    """Run the drill.

    Returns:
        Metrics: ``loss_difference`` (largest of all steps), ``resumed_from``, ``killed_after``, ``lost_steps``,
        ``passed``.

    Raises:
        DrillFailed: a part of it ended otherwise than it should, or took longer than ``limit_s``.
    """
    inputs, began = work / "inputs", time.monotonic()

    def left() -> float:
        return limit_s - (time.monotonic() - began)

    made = subprocess.run([sys.executable, str(ROOT / "examples/tiny-moe/build.py"), "--out", str(inputs)], check=False)
    if made.returncode:
        raise DrillFailed(f"examples/tiny-moe/build.py: exit code {made.returncode}")
    half = max(1, ranks // 2)
    whole = seal(inputs, work / "whole", mesh_of(ranks), ranks, device_type)
    run(whole, inputs, left())
    broken = seal(inputs, work / "broken", mesh_of(ranks), ranks, device_type)
    killed = kill_one(broken, inputs, left())
    rest = seal(inputs, work / "rest", mesh_of(half), half, device_type)
    adopt(broken / "run", rest / "run")
    run(rest, inputs, left())
    ours, theirs = read_record(rest / "run"), read_record(whole / "run")
    resumed = ours.resumed_from_steps[0]
    same = len(ours.steps) == len(theirs.steps) == STEPS
    difference = max(abs(a.loss - b.loss) for a, b in zip(ours.steps, theirs.steps, strict=False))
    return {
        "loss_difference": difference,
        "last_loss": ours.steps[-1].loss,
        "killed_after": float(killed),
        "resumed_from": float(resumed),
        "lost_steps": float(max(0, killed - resumed)),
        "ranks_after": float(half),
        "passed": float(same and difference <= TOLERANCE),
    }


def seal(inputs: Path, folder: Path, mesh: Mesh, ranks: int, device_type: str) -> Path:
    """An approved plan for that mesh in a folder of its own, with its run directory."""
    cluster = _cluster(ranks, device_type)
    recipe = Recipe.model_validate(_recipe(inputs))
    checkpoint = inputs / "checkpoint"
    config, profile = read_config(checkpoint), profile_checkpoint(checkpoint)
    sequences = recipe.batch.global_batch_sequences
    strategy = ParallelStrategy(mesh=mesh, accumulation_steps=sequences // mesh.data_ranks)
    targets = resolve_targets(parameter_shapes(checkpoint), recipe.lora, model_type=config.text_model_type)
    decision = Decision(
        model_type=config.model_type,
        architecture=config.architecture,
        checkpoint=fingerprint(checkpoint),
        data=DataPin(
            train_sha256=sha256_file(inputs / recipe.data.train),
            held_out_sha256=sha256_file(inputs / recipe.data.held_out),
        ),
        recipe=recipe,
        cluster=cluster_ref(cluster),
        strategy=strategy,
        lora_targets=targets,
        fusions=(),
        environment=versions(),
    )
    digest = cluster_digest(cluster)
    cost = estimate(profile, recipe, cluster, strategy, targets)
    search = SearchRecord(
        sampler="none", seed=0, trials=0, legal_strategies=1, feasible_strategies=1,
        oracle_step_ms=cost.time.step_ms, study_step_ms=cost.time.step_ms, versions={},
    )  # fmt: skip
    evidence = Evidence(
        profile=profile,
        cluster=cluster,
        proposals=(),
        cost=cost,
        alternatives=(),
        search=search,
        provenance=Provenance(
            shardwright="0", versions={}, cluster_digest=digest, recipe_digest=digest, graph_digest=digest
        ),
    )
    plan = AdaptationPlan.seal(decision, evidence)
    (folder / "run").mkdir(parents=True)
    plan.save(folder / "plan.json")
    plan.save(folder / "run" / "plan.json")
    approval = Approval.seal(
        decision_sha256=plan.hashes.decision,
        evidence_sha256=plan.hashes.evidence,
        verdict="approve",
        proposals=(),
        actor="multi-gpu-faults",
        actor_kind="policy",
        time="2026-01-01T00:00:00Z",
    )
    append_to_log(folder / "approvals.jsonl", approval)
    return folder


def _cluster(ranks: int, device_type: str) -> ClusterSpec:
    base = load_cluster("h200-8" if device_type == "cuda" else "cpu-2")
    return base.model_copy(update={"name": f"{base.name}-as-{ranks}", "devices_per_node": ranks, "nodes": 1})


def _recipe(inputs: Path) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load((inputs / "recipe.yaml").read_text())
    recipe["schedule"] |= {"steps": STEPS, "save_every_steps": SAVE_EVERY, "warmup_steps": 1}
    recipe["schedule"]["decay"] = "constant"
    recipe["precision"] = {"base": "float32", "adapter": "float32"}
    return recipe


def command(folder: Path, inputs: Path) -> list[str]:
    """The launcher as a process of its own, without restarts."""
    words = (
        "import sys; from pathlib import Path; from shardwright.runtime.launch.local import launch; "
        "p = [Path(a) for a in sys.argv[1:6]]; sys.exit(launch(*p, max_restarts=0))"
    )
    paths = (folder / "plan.json", inputs / "checkpoint", inputs, folder / "approvals.jsonl", folder / "run")
    return [sys.executable, "-c", words, *map(str, paths)]


def run(folder: Path, inputs: Path, limit_s: float) -> None:
    """To the end, which must be a good one."""
    with open(folder / "log", "wb") as log:
        words = ["timeout", "-k", "5", str(max(10, int(limit_s))), *command(folder, inputs)]
        done = subprocess.run(words, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise DrillFailed(f"{folder.name}: exit code {done.returncode}\n{_end_of(folder)}")


def kill_one(folder: Path, inputs: Path, limit_s: float) -> int:
    """Start, wait for a few steps, SIGKILL the last rank, wait for the end; the newest step done before that."""
    deadline = time.monotonic() + limit_s
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command(folder, inputs), stdout=log, stderr=log)
        try:
            _steps_done(folder, 1, process, deadline)
            workers = _workers(folder / "run")
            done = _steps_done(folder, KILLED_AFTER, process, deadline)
            os.kill(workers[-1], signal.SIGKILL)
            process.wait(max(10.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise DrillFailed(f"{folder.name}: goes on without the killed worker\n{_end_of(folder)}") from error
        finally:
            process.kill()
    if process.returncode == 0:
        raise DrillFailed("the run ended well although a worker was killed")
    return max(done, _steps(folder / "run"))


def _steps_done(folder: Path, wanted: int, process: subprocess.Popen[bytes], deadline: float) -> int:
    """Wait for that many steps."""
    while (done := _steps(folder / "run")) < wanted:
        if process.poll() is not None or time.monotonic() > deadline:
            raise DrillFailed(f"{folder.name}: no step {wanted}\n{_end_of(folder)}")
        time.sleep(0.01)
    return done


def _end_of(folder: Path) -> str:
    """The launcher's last words, the failure that a worker left, and the last words of each rank's newest log."""
    newest = {path.parent.name: path for path in sorted((folder / "run" / "logs").rglob("stderr.log"))}
    told = {"launcher": folder / "log", "failure": folder / "run" / FAILURE, **newest}
    texts = {name: path.read_text(errors="replace")[-1500:] for name, path in told.items() if path.is_file()}
    return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())


def _steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b'"grad_norm"') if path.is_file() else 0


def _workers(run_dir: Path) -> list[int]:
    """Process ids of the workers of this run, in order of their start."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"-u" in words and str(run_dir).encode() in words:
                found.append(int(entry.name))
    if not found:
        raise DrillFailed(f"no worker of {run_dir} is seen")
    return sorted(found)
