"""A cluster file for this machine, and a recipe to begin with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

from shardwright.schemas.cluster import ClusterSpec, DeviceSpec, HostSpec, LinkSpec
from shardwright.schemas.errors import ClusterError, UsageError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.words import plural
from shardwright.workflows.machine import host_memory_bytes, usable_cores
from shardwright.workflows.texts import read_text

RECIPE = """\
# What to train. `shardwright show --schema Recipe` describes every key.
name: my-adapter
lora:
  targets: [attention, experts]   # roles, or patterns such as "*.self_attn.q_proj"
  rank: 16
  alpha: 32
data:
  train: train.jsonl              # paths are relative to this file; one {"text": ...} a line
  held_out: held_out.jsonl
batch:
  sequence_tokens: 512
  global_batch_sequences: 8
optimizer:
  learning_rate: 0.0002
schedule:
  steps: 100
  warmup_steps: 5
  held_out_sequences: 32
  save_every_steps: 25
"""


def recipe_yaml() -> str:
    """A commented recipe with the common keys."""
    return RECIPE


def cluster_yaml(ranks: int | None) -> str:
    """This machine as a cluster file.

    Args:
        ranks: ranks on this machine; by default its CUDA devices, or at most two CPU ranks.
    """
    spec = detect_cluster(ranks)
    body = yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True)
    return f"# This machine; `sources` says which figures are assumed. `shardwright calibrate` measures them.\n{body}"


def recorded_yaml(nvidia_smi: Path | None, slurm: Path | None) -> str:
    """A cluster file from recorded outputs of nvidia-smi (needed) and sinfo.

    Raises:
        UsageError: ``no-devices``, without an output of nvidia-smi.
        ClusterError: an output cannot be read, or names no known device.
    """
    from shardwright.search_spaces.detect import GPU_QUERY, NODE_QUERY, cluster_from, parse_nvidia_smi, parse_sinfo

    if nvidia_smi is None or not nvidia_smi.is_file() or (slurm is not None and not slurm.is_file()):
        raise UsageError(
            "no-devices",
            "the recorded output is not there",
            where="--nvidia-smi" if nvidia_smi is None or not nvidia_smi.is_file() else "--slurm",
            next_action=f"record them: {GPU_QUERY} > gpus.csv; {NODE_QUERY} > nodes.txt",
        )
    nodes = parse_sinfo(read_text(slurm, ClusterError)) if slurm else ()
    spec = cluster_from(parse_nvidia_smi(read_text(nvidia_smi, ClusterError)), nodes)
    body = yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True)
    return f"# From recorded outputs; rates are the catalogue's, `sources` says where each comes from.\n{body}"


def detect_cluster(ranks: int | None) -> ClusterSpec:
    """Describe this machine.

    Raises:
        UsageError: ``too-many-ranks``: more ranks than devices or cores.
    """
    import torch

    cores, memory = usable_cores(), host_memory_bytes()
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = cuda or cores
    count = ranks or (cuda or min(cores, 2))
    if count > most:
        raise UsageError(
            "too-many-ranks",
            f"{plural(count, 'rank')} where there are {most} devices or cores",
            where="--ranks",
            next_action=f"at most {most}",
        )
    device = _cuda_device() if cuda else _cpu_rank(memory, count)
    rate, latency = (2e11, 1e-5) if cuda else (1e9, 2e-4)
    links = (LinkSpec(name="intra_node", bandwidth_bytes_per_s=rate, latency_s=latency, source="assumed"),)
    return ClusterSpec(
        name=f"{'gpu' if cuda else 'cpu'}-{count}",
        device=device,
        devices_per_node=count,
        nodes=1,
        links=links if count > 1 else (),
        host=HostSpec(memory_bytes=memory, cores=cores),
        backend="nccl" if cuda else "gloo",
    )


def _cpu_rank(memory: int, ranks: int) -> DeviceSpec:
    share = memory // ranks
    return DeviceSpec(
        name="cpu-rank",
        type="cpu",
        memory_bytes=share,
        usable_memory_bytes=int(share * 0.8),
        peak_flops={"float32": 1e11, "bfloat16": 2e11},
        achievable_flops={"float32": 5e10, "bfloat16": 5e10},
        memory_bandwidth_bytes_per_s=1e10,
        sources={
            "memory_bytes": f"found: host memory over {ranks} ranks",
            "usable_memory_bytes": "assumed: 80 % of it",
            "achievable_flops": "assumed: one core",
            "memory_bandwidth_bytes_per_s": "assumed",
        },
    )


def _cuda_device() -> DeviceSpec:
    import torch

    properties = torch.cuda.get_device_properties(0)
    total = int(properties.total_memory)
    return DeviceSpec(
        name=properties.name,
        type="cuda",
        compute_capability=f"{properties.major}.{properties.minor}",
        memory_bytes=total,
        usable_memory_bytes=int(total * 0.94),
        peak_flops={"bfloat16": 5e14, "float32": 5e13},
        achievable_flops={"bfloat16": 3e14, "float32": 4e13},
        memory_bandwidth_bytes_per_s=2e12,
        sources={
            "memory_bytes": "found",
            "usable_memory_bytes": "assumed: 94 % of it",
            "peak_flops": "assumed: replace by the datasheet's",
            "achievable_flops": "assumed: measure with `shardwright calibrate`",
            "memory_bandwidth_bytes_per_s": "assumed",
        },
    )


def refuse_existing(paths: Iterable[Path], force: bool) -> None:
    """Refuse files that are there, before the first of them is written.

    Raises:
        UsageError: ``exists``, unless ``force``.
    """
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise UsageError(
            "exists", "the file is there already", where=", ".join(there), next_action="add --force, or another name"
        )


def write_new(path: Path, text: str, force: bool) -> None:
    """Write a file that is not there yet.

    Raises:
        UsageError: ``exists``, unless ``force``.
    """
    refuse_existing((path,), force)
    write_atomic(path, text.encode())
