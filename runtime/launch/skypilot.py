"""A SkyPilot task: rendered for ``sky jobs launch``, which starts it again after a preemption; never run by us."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from shardwright.runtime.launch.engine import Engine
from shardwright.runtime.launch.job import Job
from shardwright.runtime.launch.options import LaunchOptions

FILE = "skypilot.yaml"
PORT = 29500


def render(job: Job, options: LaunchOptions) -> str:
    """The task file. Checkpoint, data and run directory must be on storage that all nodes see under these paths."""
    node = [
        *("python", "-m", "shardwright.runtime.launch.node"),
        *("--nodes", str(job.nodes), "--ranks-per-node", str(job.ranks_per_node)),
        *("--device-type", job.plan.decision.cluster.device_type, "--max-restarts", str(options.max_restarts)),
        *("--run-dir", str(job.run_dir)),
    ]
    run = "\n".join(
        [
            *options.setup,
            'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
            f'{shlex.join(node)} --node "$SKYPILOT_NODE_RANK" --endpoint "$first:{PORT}" --id "$SKYPILOT_TASK_ID" \\',
            f"  -- {shlex.join(job.worker_arguments)}",
            "",
        ]
    )
    resources: dict[str, Any] = {"job_recovery": {"max_restarts_on_errors": options.max_restarts}}
    if options.image:
        resources["image_id"] = f"docker:{options.image}"
    if job.cuda:
        resources["accelerators"] = f"{options.accelerator or accelerator(job)}:{job.ranks_per_node}"
    task = {"name": job.name, "num_nodes": job.nodes, "resources": resources, "run": run}
    return yaml.dump(task, Dumper=Blocks, sort_keys=False, width=1000)


class Blocks(yaml.SafeDumper):
    """Writes scripts as they read, line by line."""


Blocks.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def accelerator(job: Job) -> str:
    """``NVIDIA H200`` → ``H200``, as SkyPilot's catalogue spells it."""
    words = re.findall(r"[A-Z]+\d+\w*", job.plan.decision.cluster.device_name.upper())
    return words[-1] if words else job.plan.decision.cluster.device_name


ENGINE = Engine(
    name="skypilot",
    happens=f"`{FILE}` is written, not submitted",
    tested_on="checked against the schema in SkyPilot's package; not run",
    render=lambda job, options: {FILE: render(job, options)},
    options=frozenset({"image", "accelerator", "setup"}),
    submit_with="sky jobs launch {path}",
)
