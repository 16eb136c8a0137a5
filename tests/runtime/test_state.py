"""Nothing lost: G3, a killed worker, saves that are whole and belong to their plan, one run a directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.runtime import state, state_folder
from shardwright.runtime.batches import Batches
from shardwright.runtime.checks.step import digests
from shardwright.runtime.data import load_sequences
from shardwright.runtime.device import open_device
from shardwright.runtime.failure import clear_failure, read_failure
from shardwright.runtime.launch.process import RunLock
from shardwright.runtime.mesh import open_mesh
from shardwright.runtime.session import build
from shardwright.runtime.state_adopt import adopt
from shardwright.runtime.train import Trainer
from shardwright.schemas.errors import RunError, StalePlanError
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


def flip(path: Path) -> None:
    """Change one bit in the middle; the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_damaged_newest_save_is_passed_over_and_kept_as_evidence(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Callable[[Any], int]
) -> None:
    """A flipped bit of the same size: the run goes on from the save before, says so, and ends like an unbroken one."""
    recipe = {"schedule": {"steps": 4, "save_every_steps": 2}}
    whole = make_job(tiny, strategy(), recipe=recipe)
    assert single_rank(whole) == 0
    flip(next((whole.run_dir / "checkpoints" / "step-4").glob("*.distcp")))
    found = state.find(whole.run_dir, whole.plan.hashes)
    assert found is not None and found.step == 2 and len(found.damaged) == 1
    with pytest.raises(RunError, match="not-final") as caught:
        state.final(whole.run_dir, whole.plan)
    assert "step 2, the run has 4 steps" in caught.value.what
    losses = whole.losses
    assert single_rank(whole) == 0
    record = whole.record
    assert record.resumed_from_steps == (2,) and whole.losses == losses
    assert any("step-4 is damaged" in line and "went on from step-2" in line for line in record.warnings)
    assert (whole.run_dir / "checkpoints" / "step-4.damaged").is_dir()
    assert state.final(whole.run_dir, whole.plan).name == "step-4"


def test_only_the_newest_saves_stay(tiny: Any, make_job: Any, strategy: Any, process_group: None) -> None:
    job = make_job(tiny, strategy())
    trainer = make_trainer(job)
    for step in range(1, 6):
        trainer.save(step)
    assert [step for step, _ in state_folder.save_folders(job.run_dir)] == [5, 4, 3]
    assert (job.run_dir / "checkpoints" / "latest").read_text() == "step-5\n"


def test_full_disk_leaves_older_saves_as_they_are(
    tiny: Any, make_job: Any, strategy: Any, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before writing where the room is too small; a write that fails anyway leaves no half save."""
    job = make_job(tiny, strategy())
    trainer = make_trainer(job)
    folder = trainer.save(1)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    usage = state_folder.shutil.disk_usage
    monkeypatch.setattr(state_folder.shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
    with pytest.raises(RunError, match="disk-full") as caught:
        trainer.save(2)
    assert "1,000 are free" in caught.value.what and "step-1 stay" in caught.value.what
    monkeypatch.undo()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save_sharded", fails)
    with pytest.raises(RunError, match="No space left on device"):
        trainer.save(3)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert state.latest(job.run_dir, job.plan.hashes) == (1, folder)


def test_a_save_is_a_copy_that_training_cannot_change(
    tiny: Any, make_job: Any, strategy: Any, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write begins only after two more steps; what is written is the state of the first."""
    job = make_job(tiny, strategy())
    trainer = make_trainer(job)
    steps(trainer, 1, 1)
    wanted = {name: owned.local().clone() for name, owned in trainer.live.adapters.items()}
    gate, write = threading.Event(), state.save_sharded

    def late(*args: Any, **kwargs: Any) -> None:
        assert gate.wait(60)
        write(*args, **kwargs)

    monkeypatch.setattr(state, "save_sharded", late)
    folder = trainer.start_save(1)
    steps(trainer, 2, 3)
    assert not folder.exists()
    gate.set()
    trainer.saver.finish()
    found = state.read_adapters(folder)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_sigterm_saves_first_and_the_run_goes_on(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_job(tiny, strategy())
    assert single_rank(whole) == 0
    job = make_job(tiny, strategy())
    apply = Trainer.apply

    def asked(self: Trainer, step: int, gradient: Any) -> float:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return apply(self, step, gradient)

    monkeypatch.setattr(Trainer, "apply", asked)
    assert single_rank(job) == 130
    monkeypatch.undo()
    failure = read_failure(job.run_dir)
    assert failure is not None and failure["code"] == "interrupted/saved" and "step 3 of 5" in str(failure["what"])
    assert job.record.status == "interrupted" and state.latest(job.run_dir, job.plan.hashes) is not None
    clear_failure(job.run_dir)
    assert single_rank(job) == 0
    assert job.record.resumed_from_steps == (3,) and job.losses == whole.losses


def test_a_save_is_carried_to_another_mesh_only_for_the_same_training(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Callable[[Any], int]
) -> None:
    """G7: the mesh may change; else both plans are named and nothing is written."""
    recipe = {"schedule": {"steps": 4, "save_every_steps": 2}}
    old = make_job(tiny, strategy(), recipe=recipe)
    assert single_rank(old) == 0
    other = make_job(tiny, strategy(), recipe={**recipe, "optimizer": {"learning_rate": "0.02"}})
    other.run_dir.mkdir()
    other.plan.save(other.run_dir / "plan.json")
    with pytest.raises(StalePlanError, match="they differ in recipe") as caught:
        adopt(old.run_dir, other.run_dir)
    assert old.plan.hashes.decision[:16] in caught.value.what and other.plan.hashes.decision[:16] in caught.value.what
    assert not (other.run_dir / "checkpoints").exists()
    new = make_job(tiny, strategy(micro_batch_sequences=2), recipe=recipe)
    new.run_dir.mkdir()
    new.plan.save(new.run_dir / "plan.json")
    shutil.rmtree(old.run_dir / "checkpoints" / "step-4")
    assert "carried step-2" in adopt(old.run_dir, new.run_dir)
    assert "already goes on" in adopt(old.run_dir, new.run_dir)
    assert single_rank(new) == 0
    assert new.record.resumed_from_steps == (2,) and new.losses == pytest.approx(old.losses, abs=1e-5)
    assert {check.stage for check in new.record.checks} == {"load", "step"}
    assert any(old.plan.hashes.decision[:16] in line for line in new.record.warnings)


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
    _, errors = process.communicate(timeout=260)
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
        "sys.exit(launch(plan, checkpoint, data, approvals, run, timeout_s=240))"
    )
    example = job.example
    paths = (job.plan_path, example.checkpoint, example.data, job.approvals, job.run_dir)
    return ["timeout", "-k", "5", "250", sys.executable, "-c", script, *map(str, paths)]


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def kill_after_save(run_dir: Path, process: subprocess.Popen[str]) -> bool:
    """SIGKILL rank 0 once the save of step 4 is there."""
    deadline = time.monotonic() + 150
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
