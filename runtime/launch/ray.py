"""Ray Train: a TorchTrainer whose workers each run the one worker. Ray places them and restarts them after a death;
the runtime goes on from its own newest save.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from typing import Any

from shardwright.runtime.failure import clear_failure, read_failure
from shardwright.runtime.launch.allocator import choose_allocator
from shardwright.runtime.launch.engine import Engine, Say
from shardwright.runtime.launch.job import Job, write_state
from shardwright.runtime.launch.options import LaunchOptions
from shardwright.schemas.errors import ClusterError, ExitCode, RunError
from shardwright.schemas.words import plural

FILE, STORAGE = "ray.json", "ray"
START_TIMEOUT_S = "300"
"""Ray's own 60 s are short where workers import torch from slow storage."""


def render(job: Job, options: LaunchOptions) -> str:
    """What the trainer is told, as JSON."""
    body = {
        "address": options.address or "auto, else a new local one",
        "scaling": {"num_workers": job.ranks, "resources_per_worker": _resources(job)},
        "failure": {"max_failures": options.max_restarts},
        "backend": "nccl" if job.cuda else "gloo",
        "worker": ["shardwright.runtime.worker", *job.worker_arguments],
    }
    return json.dumps(body, indent=2) + "\n"


def launch(job: Job, options: LaunchOptions, *, say: Say) -> int:
    """Run the job on a Ray cluster to its end.

    Raises:
        ClusterError: ``no-ray``, ``too-small``.
        RunError: ``job-failed``.
    """
    if not installed():
        raise ClusterError(
            "no-ray",
            "the ray package is not installed",
            where="launch options: engine",
            next_action="pip install 'shardwright[ray]', or use another engine",
        )
    ray: Any = importlib.import_module("ray")
    train: Any = importlib.import_module("ray.train")
    torch_train: Any = importlib.import_module("ray.train.torch")

    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", START_TIMEOUT_S)
    started = not ray.is_initialized()
    if started:
        ray.init(address=options.address or None, log_to_driver=True)
    try:
        _require(ray, job)
        clear_failure(job.run_dir)
        write_state(job.run_dir, "ray", str(ray.get_runtime_context().get_job_id()), options.address or "local")
        trainer = torch_train.TorchTrainer(
            worker_loop,
            train_loop_config={"arguments": job.worker_arguments},
            torch_config=torch_train.TorchConfig(backend="nccl" if job.cuda else "gloo"),
            scaling_config=train.ScalingConfig(
                num_workers=job.ranks, use_gpu=job.cuda, resources_per_worker=_resources(job)
            ),
            run_config=train.RunConfig(
                name=job.name,
                storage_path=str(job.run_dir / STORAGE),
                failure_config=train.FailureConfig(max_failures=options.max_restarts),
            ),
        )
        say(f"Ray: {plural(job.ranks, 'worker')} on {plural(len(ray.nodes()), 'node')}")
        try:
            trainer.fit()
        except train.TrainingFailedError as error:
            failure = read_failure(job.run_dir)
            if failure is not None:
                return int(failure["exit_code"])
            raise RunError(
                "job-failed",
                f"Ray gave up: {error}"[:1000],
                where=str(job.run_dir / STORAGE),
                next_action="read Ray's logs; `shardwright resume` goes on from the newest save",
            ) from error
    finally:
        if started:
            ray.shutdown()
    failure = read_failure(job.run_dir)
    return int(ExitCode.OK if failure is None else failure["exit_code"])


def installed() -> bool:
    """Whether the extra is there."""
    return importlib.util.find_spec("ray") is not None


def worker_loop(config: dict[str, Any]) -> None:
    """One Ray worker: set torchrun's environment from Ray's context, then be the worker.

    A typed failure is in ``failure.json`` and would come back: the loop ends quietly and the launcher reads it.
    """
    train: Any = importlib.import_module("ray.train")

    context = train.get_context()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(context.get_world_rank()), str(context.get_world_size())
    os.environ["LOCAL_RANK"] = str(context.get_local_rank())
    choose_allocator(os.environ)
    from shardwright.runtime.worker import main

    main(config["arguments"])


def _require(ray: Any, job: Job) -> None:
    key = "GPU" if job.cuda else "CPU"
    have = int(ray.cluster_resources().get(key, 0))
    if have < job.ranks:
        raise ClusterError(
            "too-small",
            f"the plan takes {job.ranks} workers with one {key} each, the Ray cluster has {have}",
            where="ray.cluster_resources()",
            next_action="add nodes, or plan for this cluster",
        )


def _resources(job: Job) -> dict[str, float]:
    return {"GPU": 1, "CPU": 1} if job.cuda else {"CPU": 1}


ENGINE = Engine(
    name="ray",
    happens="Ray Train places and restarts the workers (extra `ray`)",
    tested_on="two raylets on one host, SIGKILL of a rank in mid-run: the losses of an unbroken run",
    render=lambda job, options: {FILE: render(job, options)},
    options=frozenset({"address"}),
    start=lambda job, options, say: launch(job, options, say=say),
    package="ray",
)
