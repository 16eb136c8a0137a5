"""Ray Train for real: two nodes on this host, one worker killed, the same end as an unbroken run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwright.runtime.launch import ray as ray_engine
from shardwright.runtime.launch.job import Job
from shardwright.runtime.launch.options import LaunchOptions
from shardwright.schemas.errors import ClusterError


def job_of(made: Any, tiny: Any) -> Job:
    return Job.of(made.plan_path, tiny.checkpoint, tiny.data, made.approvals, made.run_dir)


def test_ray_that_is_not_installed_is_named(
    tiny: Any, make_job: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "installed", lambda: False)
    job = job_of(make_job(tiny, strategy(ep=2)), tiny)
    with pytest.raises(ClusterError, match="no-ray"):
        ray_engine.launch(job, LaunchOptions(engine="ray"), say=lambda text: None)
    assert '"num_workers": 2' in ray_engine.render(job, LaunchOptions(engine="ray"))


@pytest.mark.slow
def test_killed_ray_worker_ends_as_an_unbroken_run(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Callable[[Any], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_DISABLE_MEMORY_MONITOR", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recipe = {"schedule": {"steps": 14, "save_every_steps": 2}}
    unbroken = make_job(tiny, strategy(), recipe=recipe)
    assert single_rank(unbroken) == 0
    made = make_job(tiny, strategy(ep=2), recipe=recipe)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        killer = threading.Thread(target=kill_after_save, args=(made.run_dir,), daemon=True)
        killer.start()
        job = job_of(made, tiny)
        options = LaunchOptions(engine="ray", address=cluster.address, max_restarts=2)
        assert ray_engine.launch(job, options, say=lambda text: None) == 0
        killer.join(5)
    finally:
        cluster.shutdown()
    record = made.record
    assert record.status == "trained" and len(record.resumed_from_steps) == 1 and record.resumed_from_steps[0] >= 4
    assert made.losses == pytest.approx(unbroken.losses, abs=1e-5)


def kill_after_save(run_dir: Path) -> None:
    """SIGKILL of rank 0 once the save of step 4 is there."""
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        if (run_dir / "checkpoints" / "step-4").is_dir():
            os.kill(int((run_dir / ".worker.lock").read_text()), signal.SIGKILL)
            return
        time.sleep(0.01)
