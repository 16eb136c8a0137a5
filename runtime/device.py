"""Everything that depends on the kind of device. Another back end is added here and nowhere else."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.schemas.errors import ClusterError

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
"""Writing 5 there makes Linux count the peak resident set anew."""
HOPPER = (9, 0)
HOPPER_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Order in which attention is tried from this compute capability on."""


@dataclass(frozen=True)
class Device:
    """The device of this rank.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        torch_device: where tensors live.
        backend: collective back end.
    """

    kind: str
    torch_device: torch.device
    backend: str

    @property
    def name(self) -> str:
        """The device's own name; ``cpu`` has none."""
        return torch.cuda.get_device_name(self.torch_device) if self.kind == "cuda" else "cpu"

    def synchronize(self) -> None:
        """Wait until queued work is done, so that a clock read means something."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def peak_memory_bytes(self) -> int:
        """Highest memory since the last reset: allocated device memory, or the process's resident set on a CPU."""
        if self.kind == "cuda":
            return int(torch.cuda.max_memory_allocated(self.torch_device))
        return peak_host_bytes()

    def release(self) -> None:
        """Give back what nothing uses: modules that refer to themselves keep their weights until Python looks."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Memory that this rank could still take, bytes, after :meth:`release`."""
        self.release()
        if self.kind == "cuda":
            return int(torch.cuda.mem_get_info(self.torch_device)[0])
        return available_host_bytes()

    def reset_peak_memory(self) -> None:
        """Give free memory back and count the peak anew, so that a check's own memory is not the run's."""
        self.release()
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch_device)
        else:
            reset_peak_host()

    def attention(self) -> AbstractContextManager[None]:
        """Inside it torch's attention takes this device's fastest kernel that fits: on Hopper cuDNN's before Flash's.

        The backward of a layer that is computed again runs attention once more, so it belongs inside too.
        """
        if self.kind != "cuda" or torch.cuda.get_device_capability(self.torch_device) < HOPPER:
            return nullcontext()
        return sdpa_kernel(HOPPER_ATTENTION, set_priority=True)

    def manual_seed(self, seed: int) -> None:
        """Seed the default generators of host and device."""
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """States of the default generators."""
        state = {"cpu": torch.get_rng_state()}
        if self.kind == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.torch_device)
        return state

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Undo :meth:`rng_state`."""
        torch.set_rng_state(state["cpu"])
        if self.kind == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.torch_device)


def open_device(kind: str, local_rank: int) -> Device:
    """The device of a local rank.

    Raises:
        ClusterError: ``no-device`` when this machine lacks it.
    """
    if kind == "cpu":
        return Device("cpu", torch.device("cpu"), "gloo")
    if kind == "cuda":
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ClusterError(
                "no-device",
                f"the plan wants a cuda device for local rank {local_rank}; this machine has {count}",
                where=f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}",
                next_action="run on the cluster the plan was made for, or plan for this one",
            )
        torch.cuda.set_device(local_rank)
        return Device("cuda", torch.device("cuda", local_rank), "nccl")
    raise ClusterError(
        "no-device",
        f"no back end for device type {kind!r}",
        where="decision.cluster.device_type",
        next_action="add it to runtime/device.py",
    )


def available(kind: str) -> bool:
    """Whether this machine has a device of that kind."""
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def peak_host_bytes() -> int:
    """Peak resident set of this process since the last reset, bytes."""
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_host() -> None:
    """Give free host memory back and count its peak anew, where the machine lets a process do so."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    if os.access(CLEAR_REFS, os.W_OK):
        CLEAR_REFS.write_text("5")


def available_host_bytes() -> int:
    """Host memory that can be taken without swapping, bytes: the smaller of the machine's and the cgroup's."""
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
