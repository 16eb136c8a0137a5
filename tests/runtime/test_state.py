"""Nothing lost: G3, a killed worker, saves that are whole and belong to their plan, one run a directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.runtime import state
from shardwright.runtime.checks.step import digests
from shardwright.runtime.data import Batches, load_sequences
from shardwright.runtime.device import open_device
from shardwright.runtime.failure import read_failure
from shardwright.runtime.launch.process import RunLock
from shardwright.runtime.mesh import open_mesh
from shardwright.runtime.session import build
from shardwright.runtime.train import Trainer
from shardwright.schemas.errors import RunError
from shardwright.schemas.plan import PlanHashes


@pytest.fixture
def process_group() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_trainer(job: Any) -> Trainer:
    device = open_device("cpu", 0)
    ranks = open_mesh(job.plan.decision.strategy.mesh, device)
    live = build(job.plan, job.example.checkpoint, ranks, device, None)
    recipe = job.plan.decision.recipe
    rows = load_sequences(
        job.example.data / recipe.data.train, recipe, live.files.folder, live.files.config, job.run_dir / "data", 1
    )
    return Trainer(job.plan, live, Batches(rows, 4, 1, 1, 0), rows[:3], ranks, device, job.run_dir)


def steps(trainer: Trainer, first: int, last: int) -> list[float]:
    return [trainer.step(step, lambda step, gradient: None)[0].loss for step in range(first, last + 1)]


def test_three_steps_a_save_and_two_more_equal_five(
    tiny: Any, make_job: Any, strategy: Any, process_group: None
) -> None:
    """G3: losses of steps 4 and 5 are equal to the last bit, and so are the adapters right after the load."""
    whole = steps(make_trainer(make_job(tiny, strategy())), 1, 5)
    job = make_job(tiny, strategy())
    before = make_trainer(job)
    assert steps(before, 1, 3) == whole[:3]
    before.save(3)
    after = make_trainer(job)
    fresh = digests(after.live.parameters, adapters=True)
    assert after.resume() == 3
    assert digests(after.live.parameters, adapters=True) == digests(before.live.parameters, adapters=True) != fresh
    assert steps(after, 4, 5) == whole[3:]


def test_save_is_whole_named_and_tied_to_its_plan(tiny: Any, make_job: Any, strategy: Any, process_group: None) -> None:
    job = make_job(tiny, strategy())
    trainer = make_trainer(job)
    assert trainer.resume() == 0
    steps(trainer, 1, 1)
    folder = trainer.save(1)
    assert trainer.save(1) == folder
    assert sorted(entry.name for entry in folder.parent.iterdir()) == ["latest", "step-1"]
    other = PlanHashes(decision="0" * 64, evidence="0" * 64)
    with pytest.raises(RunError, match="other-plan") as caught:
        state.latest(job.run_dir, other)
    assert job.plan.hashes.decision[:16] in caught.value.what and "0" * 16 in caught.value.what
    victim = next(folder.glob("*.distcp"))
    data = victim.read_bytes()
    victim.write_bytes(data[:-10])
    with pytest.raises(RunError, match="damaged-save") as caught:
        state.latest(job.run_dir, job.plan.hashes)
    assert f"{len(data)} bytes expected, {len(data) - 10} found" in caught.value.what
    (folder / state.MANIFEST).unlink()
    with pytest.raises(RunError, match="damaged-save"):
        state.latest(job.run_dir, job.plan.hashes)


def test_a_run_directory_belongs_to_one_process(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom shardwright.runtime.launch.process import RunLock\n"
        "RunLock(Path(sys.argv[1]), 'lock').acquire(0)\nsys.stdout.write('held\\n')\nsys.stdout.flush()\ntime.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(RunError, match="run-dir-in-use") as caught:
        RunLock(tmp_path, "lock").acquire(0.3)
    assert str(holder.pid) in caught.value.what
    holder.kill()
    holder.wait()
    lock = RunLock(tmp_path, "lock")
    lock.acquire(5)
    lock.release()


@pytest.mark.slow
def test_killed_worker_is_restarted_and_ends_like_an_unbroken_run(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Callable[[Any], int]
) -> None:
    """SIGKILL of rank 0 in mid-run under ``launch``: resumed from the save, same losses as a run on one rank."""
    recipe = {"schedule": {"steps": 14, "save_every_steps": 2}}
    unbroken = make_job(tiny, strategy(), recipe=recipe)
    assert single_rank(unbroken) == 0
    job = make_job(tiny, strategy(ep=2), recipe=recipe)
    process = subprocess.Popen(launch_command(job), env=environment(), stderr=subprocess.PIPE, text=True)
    killed = kill_after_save(job.run_dir, process)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-4000:]
    record = job.record
    assert record.status == "trained" and len(record.resumed_from_steps) == 1 and record.resumed_from_steps[0] >= 4
    assert [step.step for step in record.steps] == list(range(1, 15))
    assert job.losses == pytest.approx(unbroken.losses, abs=1e-5)
    assert record.expert_loads == unbroken.record.expert_loads
    lines = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sorted(line["step"] for line in lines if line["kind"] == "step") == list(range(1, 15))
    assert killed and read_failure(job.run_dir) is None
    assert (job.run_dir / "logs").is_dir() and list((job.run_dir / "tensorboard").iterdir())


def launch_command(job: Any) -> list[str]:
    script = (
        "import sys\nfrom pathlib import Path\nfrom shardwright.runtime.launch.local import launch\n"
        "plan, checkpoint, data, approvals, run = map(Path, sys.argv[1:])\n"
        "sys.exit(launch(plan, checkpoint, data, approvals, run, timeout_s=100))"
    )
    example = job.example
    paths = (job.plan_path, example.checkpoint, example.data, job.approvals, job.run_dir)
    return ["timeout", "-k", "5", "110", sys.executable, "-c", script, *map(str, paths)]


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def kill_after_save(run_dir: Path, process: subprocess.Popen[str]) -> bool:
    """SIGKILL rank 0 once the save of step 4 is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (run_dir / "checkpoints" / "step-4").is_dir():
            os.kill(int((run_dir / ".worker.lock").read_text()), signal.SIGKILL)
            return True
        time.sleep(0.01)
    return False


def test_random_state_round_trip() -> None:
    device = open_device("cpu", 0)
    device.manual_seed(5)
    kept = device.rng_state()
    first = torch.rand(3)
    device.set_rng_state(kept)
    assert torch.equal(torch.rand(3), first)
