"""Kubernetes manifests: a Kubeflow TrainJob and, for clusters without Kubeflow, a JobSet. Rendered and checked against
their published schemas; never run on a cluster by us.

Both mount one volume at the common parent of checkpoint, data, approvals and run, so paths inside are those outside.
"""

from __future__ import annotations

import os
from typing import Any

import yaml

from shardwright.runtime.launch.engine import Engine
from shardwright.runtime.launch.job import Job
from shardwright.runtime.launch.options import LaunchOptions
from shardwright.schemas.errors import UsageError

TRAINJOB, JOBSET = "trainjob.yaml", "jobset.yaml"
MANAGER = "shardwright.io/launch"
GRACE_S = 150
"""Between SIGTERM and SIGKILL: the step in progress and its save."""


def render(job: Job, options: LaunchOptions) -> dict[str, str]:
    """Both manifests.

    Raises:
        UsageError: ``no-image``.
    """
    if not options.image:
        raise UsageError(
            "no-image",
            "a pod needs a container image with this program in it",
            where="launch options: image",
            next_action="write `engine: kubernetes` and `image: REGISTRY/NAME:TAG` into a file for --launch",
        )
    return {
        TRAINJOB: yaml.safe_dump(train_job(job, options), sort_keys=False),
        JOBSET: yaml.safe_dump(job_set(job, options), sort_keys=False),
    }


def mount_point(job: Job) -> str:
    """The deepest folder above everything that a worker reads or writes."""
    paths = (job.plan_path, job.approvals, job.checkpoint, job.data_root, job.run_dir)
    return os.path.commonpath([str(path) for path in paths])


def train_job(job: Job, options: LaunchOptions) -> dict[str, Any]:
    """``trainer.kubeflow.org/v1alpha1`` as of Kubeflow Trainer 2.3.

    Kubeflow's runtime sets ``PET_*``, torchrun's own variables; the volume is patched into its pods.
    """
    pod = {
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": options.volume_claim}}],
        "containers": [{"name": "node", "volumeMounts": [{"name": "runs", "mountPath": mount_point(job)}]}],
        "terminationGracePeriodSeconds": GRACE_S,
    }
    patch = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name, "namespace": options.namespace},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": options.runtime,
            },
            "trainer": {
                "image": options.image,
                "numNodes": job.nodes,
                "numProcPerNode": job.ranks_per_node,
                "command": ["torchrun"],
                "args": ["--module", "shardwright.runtime.worker", *job.worker_arguments],
                "env": _environment(job),
                "resourcesPerNode": _resources(job),
            },
            "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": patch}}}],
        },
    }


def job_set(job: Job, options: LaunchOptions) -> dict[str, Any]:
    """``jobset.x-k8s.io/v1alpha2``: one indexed job, a pod a node; pod 0 holds the rendezvous."""
    first = f"{job.name}-workers-0-0.{job.name}"
    command = [
        *("python", "-m", "shardwright.runtime.launch.node", "--nodes", str(job.nodes)),
        *("--node", "$(JOB_COMPLETION_INDEX)", "--ranks-per-node", str(job.ranks_per_node)),
        *("--endpoint", f"{first}:{options.port}", "--id", job.name, "--max-restarts", str(options.max_restarts)),
        *("--device-type", job.plan.decision.cluster.device_type, "--run-dir", str(job.run_dir), "--"),
        *job.worker_arguments,
    ]
    container = {
        "name": "worker",
        "image": options.image,
        "command": command,
        "env": _environment(job),
        "ports": [{"containerPort": options.port}],
        "resources": _resources(job),
        "volumeMounts": [
            {"name": "runs", "mountPath": mount_point(job)},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.volume_claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    workers = {
        "name": "workers",
        "replicas": 1,
        "template": {
            "spec": {
                "parallelism": job.nodes,
                "completions": job.nodes,
                "completionMode": "Indexed",
                "backoffLimit": 0,
                "template": {"spec": pod},
            }
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, "namespace": options.namespace},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": options.max_restarts},
            "replicatedJobs": [workers],
        },
    }


def _environment(job: Job) -> list[dict[str, str]]:
    return [
        {"name": "HF_HUB_OFFLINE", "value": "1"},
        {"name": "TOKENIZERS_PARALLELISM", "value": "false"},
        {"name": "SHARDWRIGHT_DECISION", "value": job.plan.hashes.decision},
    ]


def _resources(job: Job) -> dict[str, Any]:
    if job.cuda:
        return {"limits": {"nvidia.com/gpu": str(job.ranks_per_node)}}
    return {"requests": {"cpu": str(job.ranks_per_node)}}


ENGINE = Engine(
    name="kubernetes",
    happens=f"`{TRAINJOB}` (Kubeflow) and `{JOBSET}` are written, not submitted",
    tested_on="checked against Kubeflow's published models; not run on a cluster",
    render=render,
    options=frozenset({"image", "namespace", "runtime", "volume_claim", "port"}),
    submit_with="kubectl apply -f {path}",
)
