"""Engines: what would be submitted, what is refused with both sides, and Slurm for real on this host."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.runtime.failure import read_failure
from shardwright.runtime.launch import engines, kubernetes, node, process, skypilot, slurm
from shardwright.runtime.launch.job import Job, read_state
from shardwright.runtime.launch.options import LaunchOptions, parse_options, read_options, write_options
from shardwright.runtime.state import latest
from shardwright.schemas.errors import ClusterError, UsageError

ROOT = Path(__file__).resolve().parents[2]


def two_nodes(make_job: Any, tiny: Any, strategy: Any, *, cuda: bool = False, **axes: Any) -> tuple[Any, Job]:
    """A plan over two nodes with half of the ranks on each."""
    chosen = strategy(**(axes or {"ep": 2}))
    world = chosen.mesh.world_size
    cluster = make_job(tiny, chosen).plan.decision.cluster
    named = {"device_type": "cuda", "device_name": "NVIDIA H200"} if cuda else {}
    changed = cluster.model_copy(update={"world_size": world, "devices_per_node": world // 2, **named})
    recipe = {"schedule": {"steps": 24, "save_every_steps": 4}}
    made = make_job(tiny, chosen, recipe=recipe, cluster=changed)
    return made, Job.of(made.plan_path, tiny.checkpoint, tiny.data, made.approvals, made.run_dir)


def test_sbatch_has_one_task_a_node_and_a_new_rendezvous_for_every_requeue(
    tiny: Any, make_job: Any, strategy: Any
) -> None:
    """H4: torchrun starts the ranks of a node; with a task for each of them every port would be bound twice."""
    _, job = two_nodes(make_job, tiny, strategy, cuda=True, ep=4)
    options = LaunchOptions(
        engine="slurm", partition="big", account="lab", time_limit="04:00:00", extra=("--exclusive",)
    )
    text = slurm.render(job, options)
    head = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=2",
        "--requeue",
        "--partition=big",
        "--account=lab",
    } < {*head}
    assert {"--time=04:00:00", "--exclusive", "--signal=TERM@120"} < {*head}
    assert "--ranks-per-node 2" in text and '--id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"' in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    for mixed in ("--ntasks-per-node=8", "--ntasks=16", "-n 4"):
        with pytest.raises(ClusterError, match="tasks-per-node") as caught:
            slurm.render(job, options.model_copy(update={"extra": (mixed,)}))
        assert mixed in caught.value.what
    assert slurm.render(job, options.model_copy(update={"extra": ("--ntasks-per-node=1",)}))


def test_a_step_with_a_task_for_each_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="nested-launch") as caught:
        node.refuse_nested({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"})
    assert "8 tasks a node" in caught.value.what
    with pytest.raises(UsageError, match="RANK is already set"):
        node.refuse_nested({"RANK": "0"})
    node.refuse_nested({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"})


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, sinfo: str, submitted: str = "echo 7") -> None:
    """sinfo and sbatch that answer as told; a job that Slurm has forgotten."""
    for name, body in {"sinfo": f"printf '{sinfo}'", "sbatch": submitted, "scontrol": "exit 1"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_small_or_unknown_partitions_are_refused_with_both_sides(
    tiny: Any, make_job: Any, strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, job = two_nodes(make_job, tiny, strategy)
    fake_slurm(tmp_path, monkeypatch, "big*|a|idle\\nbig*|b|allocated\\nsmall|c|idle\\nsmall|d|down*\\n")
    with pytest.raises(ClusterError, match="no-partition") as caught:
        slurm.submit(job, LaunchOptions(engine="slurm", partition="huge"), say=lambda text: None)
    assert "'huge'" in caught.value.what and "big, small" in caught.value.what
    with pytest.raises(ClusterError, match="too-small") as caught:
        slurm.submit(job, LaunchOptions(engine="slurm", partition="small"), say=lambda text: None)
    assert "2 nodes with 1 rank each, found 1" in caught.value.what and caught.value.where == "partition small"
    assert not job.run_dir.exists()
    assert slurm.submit(job, LaunchOptions(engine="slurm"), say=lambda text: None) == "7"
    assert read_state(job.run_dir) == {"engine": "slurm", "job_id": "7", "where": "default partition"}
    assert engines.cancel(job.run_dir) is None and "forgotten" in engines.where(job.run_dir)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ClusterError, match="no-slurm"):
        slurm.partition_nodes("")


def test_options_are_kept_beside_the_run_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    assert read_options(tmp_path).engine == "local"
    options = parse_options("slurm").model_copy(update={"partition": "p"})
    write_options(tmp_path, options)
    assert read_options(tmp_path) == options
    path = tmp_path / "launch.yaml"
    path.write_text("engine: slurm\npartition: q\nmax_restarts: 1\n")
    assert parse_options(str(path)).partition == "q"
    path.write_text("engine: slurm\npartitoin: q\n")
    with pytest.raises(UsageError, match="partitoin: unknown key"):
        parse_options(str(path))
    with pytest.raises(UsageError, match="unknown-engine"):
        parse_options("sge")


def test_kubernetes_manifests_mount_what_workers_need(tiny: Any, make_job: Any, strategy: Any) -> None:
    _, job = two_nodes(make_job, tiny, strategy, cuda=True, ep=4)
    options = LaunchOptions(engine="kubernetes", image="registry/shardwright:1", namespace="train")
    with pytest.raises(UsageError, match="no-image"):
        kubernetes.render(job, LaunchOptions(engine="kubernetes"))
    texts = kubernetes.render(job, options)
    train, jobs = (yaml.safe_load(texts[name]) for name in (kubernetes.TRAINJOB, kubernetes.JOBSET))
    trainer = train["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "2"}}
    inner = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert inner["completions"] == inner["parallelism"] == 2 and inner["completionMode"] == "Indexed"
    pod = inner["template"]["spec"]
    mounted = Path(pod["containers"][0]["volumeMounts"][0]["mountPath"])
    for path in (job.plan_path, job.approvals, job.checkpoint, job.data_root, job.run_dir):
        assert path.is_relative_to(mounted)
    assert pod["terminationGracePeriodSeconds"] > 120
    words = pod["containers"][0]["command"]
    assert words[words.index("--endpoint") + 1] == f"{job.name}-workers-0-0.{job.name}:29500"
    assert len(job.name) <= 52 and job.name == job.name.lower()


def gone(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """What of our manifest is missing or other after a published model has read it and written it back."""
    if isinstance(ours, dict):
        return [line for key in ours for line in gone(ours[key], (theirs or {}).get(key), f"{path}.{key}")]
    if isinstance(ours, list):
        if not isinstance(theirs, list) or len(ours) != len(theirs):
            return [path]
        return [line for at, pair in enumerate(zip(ours, theirs, strict=True)) for line in gone(*pair, f"{path}[{at}]")]
    return [] if ours == theirs else [f"{path}: {ours!r} became {theirs!r}"]


@pytest.mark.parametrize(
    ("name", "module", "model"),
    [
        (kubernetes.TRAINJOB, "trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
        (kubernetes.JOBSET, "jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
    ],
)
def test_manifests_follow_the_published_schemas(
    name: str, module: str, model: str, tiny: Any, make_job: Any, strategy: Any
) -> None:
    """Kubeflow's own models take every key and give it back; a misspelt one is noticed."""
    models = pytest.importorskip(f"kubeflow_trainer_api.models.{module}")
    _, job = two_nodes(make_job, tiny, strategy, cuda=True, ep=4)
    body = yaml.safe_load(kubernetes.render(job, LaunchOptions(engine="kubernetes", image="r/s:1"))[name])
    assert gone(body, getattr(models, model).from_dict(body).to_dict()) == []
    wrong = {**body, "spec": {**body["spec"], "replicas": 2}}
    assert gone(wrong, getattr(models, model).from_dict(wrong).to_dict()) == [".spec.replicas: 2 became None"]


def test_skypilot_task_names_accelerator_and_rank(tiny: Any, make_job: Any, strategy: Any) -> None:
    _, job = two_nodes(make_job, tiny, strategy, cuda=True, ep=4)
    task = yaml.safe_load(skypilot.render(job, LaunchOptions(engine="skypilot")))
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H200:2"
    assert '--node "$SKYPILOT_NODE_RANK"' in task["run"]
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0


def test_rendered_only_engines_write_and_stop(tiny: Any, make_job: Any, strategy: Any) -> None:
    made, job = two_nodes(make_job, tiny, strategy)
    write_options(job.run_dir, LaunchOptions(engine="skypilot"))
    with pytest.raises(UsageError, match="rendered-only") as caught:
        engines.launch(made.plan_path, tiny.checkpoint, tiny.data, made.approvals, made.run_dir)
    assert (job.run_dir / skypilot.FILE).is_file() and "sky jobs launch" in caught.value.next_action
    local = engines.render(job, LaunchOptions())["command"]
    assert "--nproc-per-node=2" in shlex.split(local) and "shardwright.runtime.worker" in local


def test_a_child_whose_parent_died_before_it_asked_dies_too(tmp_path: Path) -> None:
    """The gap between the start of a process and its request to the kernel."""
    script = (
        "import os, sys, time\nfrom shardwright.runtime.launch.process import PARENT, die_with_parent\n"
        "os.environ[PARENT] = sys.argv[1]\ndie_with_parent()\nsys.exit(7 if PARENT not in os.environ else 8)"
    )

    def end(parent: int) -> int:
        return subprocess.run([sys.executable, "-c", script, str(parent)], check=False).returncode

    assert end(os.getpid()) == 7
    assert end(1) == -9
    assert process.PARENT not in os.environ


@pytest.mark.slow
def test_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    """SIGKILL of whoever started torchrun: agent and worker are gone within seconds, the pipe is closed."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom shardwright.runtime.launch import local\nrun = Path(sys.argv[1])\n"
        "command = local.torchrun_command(1, run, 0)\n"
        "at = command.index('--module')\n"
        "local._watch([*command[:at], sys.argv[2]], local.environment('cpu', 1), run, None)"
    )
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys, time\nfrom shardwright.runtime.launch.process import die_with_parent\ndie_with_parent()\n"
        "sys.stdout.write(f'pids {os.getpid()} {os.getppid()}\\n')\nsys.stdout.flush()\ntime.sleep(300)"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run"), str(worker)], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    line = next(text for text in started.stdout if "pids" in text)
    pids = [int(word) for word in line.split()[-2:]]
    started.kill()
    began = time.monotonic()
    assert started.stdout.read() == ""
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids):
        assert time.monotonic() - began < 20
        time.sleep(0.02)
    started.wait()


@pytest.fixture(scope="module")
def slurm_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """slurmctld and two slurmd on this host."""
    folder = tmp_path_factory.mktemp("slurm")
    script = str(ROOT / "scripts" / "slurm-one-host.sh")
    done = subprocess.run([script, "start", str(folder)], capture_output=True, text=True, timeout=180, check=False)
    if done.returncode == 3:
        pytest.skip("Slurm is not installed and cannot be installed by this user")
    assert done.returncode == 0, done.stderr
    yield Path(done.stdout.strip())
    subprocess.run([script, "stop", str(folder)], check=True)


@pytest.mark.slow
def test_requeued_slurm_job_ends_as_an_unbroken_run(
    tiny: Any,
    make_job: Any,
    strategy: Any,
    single_rank: Callable[[Any], int],
    slurm_here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes under Slurm; ``scontrol requeue`` in mid-run: workers save, the job comes back and goes on."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_here))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recipe = {"schedule": {"steps": 24, "save_every_steps": 4}}
    unbroken = make_job(tiny, strategy(), recipe=recipe)
    assert single_rank(unbroken) == 0
    made, job = two_nodes(make_job, tiny, strategy)
    options = LaunchOptions(engine="slurm", partition="ci")
    said: list[str] = []
    job_id = slurm.submit(job, options, say=said.append)
    wait_for(lambda: steps_done(made.run_dir) >= 5 or slurm.show(job_id)["JobState"] == "FAILED", 200)
    assert slurm.show(job_id)["JobState"] == "RUNNING", "".join(
        path.read_text() for path in (made.run_dir / "logs").glob("slurm-*.out")
    )
    subprocess.run(["scontrol", "requeue", job_id], check=True)
    wait_for(lambda: slurm.show(job_id).get("JobState") == "PENDING", 90)
    assert latest(made.run_dir, made.plan.hashes) is not None
    failure = read_failure(made.run_dir)
    assert failure is not None and failure["code"] == "interrupted/saved"
    subprocess.run(["scontrol", "update", f"jobid={job_id}", "StartTime=now"], check=True)
    assert slurm.launch(job, options, say=said.append, timeout_s=200) == 0
    assert f"Slurm job {job_id} already runs this directory" in said
    record = made.record
    assert record.status == "trained" and record.world_size == 2
    assert len(record.resumed_from_steps) == 1 and record.resumed_from_steps[0] >= 5
    assert made.losses == pytest.approx(unbroken.losses, abs=1e-5)
    assert slurm.show(job_id)["Restarts"] == "1" and "COMPLETED" in engines.where(made.run_dir)


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.is_file() else 0


def wait_for(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)
