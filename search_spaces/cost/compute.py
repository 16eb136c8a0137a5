"""Counted work into time: the only place where an OpCost meets a device.

Legend: T tokens on a rank, R routed rows on a rank, H hidden, I expert width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.schemas.cluster import Calibration, ClusterSpec, DeviceSpec
from shardwright.schemas.errors import ClusterError
from shardwright.schemas.ops import EvidenceOrigin, OpCost, PassCost
from shardwright.search_spaces.calibration import rate_at

GROUPED_SHARE_OF_PEAK = 0.64
"""Grouped products reach this share of the datasheet peak once weight and row traffic is added:
fit of four H200 points (73–512 rows per expert), largest error 6 %."""

GROUPED_READ = 1.13
"""Weights stream this much faster than a copy moves bytes: 4.8 against 4.25 TB/s in the same fit."""

ATTENTION_SHARE = 0.5
"""Causal attention over a large matrix product: flash attention in torch 2.11 on one H200 reached
330–348 TFLOP/s forward against 693."""

ATTENTION_BACKWARD = 2.5
"""Backward over forward flops of attention."""

CPU_GROUPED_SHARE = 0.8
"""Grouped over plain products on a CPU rank; assumed."""

CPU_FIRST_TOUCH = 2.0e9
"""Bytes/s of writing to fresh memory on a CPU rank (page faults): a twelfth of a copy's rate, the ratio
measured under load at 64–256 MiB. `shardwright calibrate` measures it."""


def op_time_ms(cost: OpCost, device: DeviceSpec, pass_name: str) -> float:
    """Time of one operator alone.

    The larger of flops over achievable rate and bytes over bandwidth. On an accelerator launches
    overlap with running kernels, so the host's launch time is a floor; on a CPU it is added.

    Args:
        pass_name: ``fwd``, ``bwd``, ``fwd+bwd`` or ``fwd+dx``.

    Raises:
        ClusterError: ``no-rate`` where the device has no figure for the dtype.
    """
    by_name: dict[str, list[PassCost | None]] = {
        "fwd": [cost.forward],
        "bwd": [cost.backward],
        "fwd+bwd": [cost.forward, cost.backward],
        "fwd+dx": [cost.forward, cost.backward],
    }
    return sum(pass_time_ms(one, device, cost.dtype) for one in by_name[pass_name] if one is not None)


def pass_time_ms(one: PassCost, device: DeviceSpec, dtype: str) -> float:
    """Time of one pass, milliseconds."""
    work = max(one.flops / flops_rate(device, dtype), traffic_s(one, device))
    launches = one.launches * device.launch_overhead_s
    return 1e3 * (work + launches if device.type == "cpu" else max(work, launches))


def traffic_s(one: PassCost, device: DeviceSpec) -> float:
    return (one.bytes_read + one.bytes_written) / device.memory_bandwidth_bytes_per_s


def flops_rate(device: DeviceSpec, dtype: str) -> float:
    """Achievable flop/s of a large matrix product."""
    rate = device.achievable_flops.get(dtype)
    if rate is None:
        raise ClusterError(
            "no-rate",
            f"device {device.name} has no achievable_flops for {dtype}",
            where=f"device.achievable_flops of {device.name}",
            next_action=f"add {dtype} to the cluster file, or use precision.base "
            f"{' or '.join(sorted(device.achievable_flops))}",
        )
    return rate


@dataclass(frozen=True)
class Rates:
    """The rates of one device, from its calibration where there is one."""

    device: DeviceSpec
    dtype: str
    calibration: Calibration | None = None

    @classmethod
    def of(cls, cluster: ClusterSpec, dtype: str, calibration: Calibration | None) -> Rates:
        flops_rate(cluster.device, dtype)
        return cls(cluster.device, dtype, calibration)

    def origin(self, curve: str) -> EvidenceOrigin:
        """``measured`` where the calibration has this curve, else ``modelled``."""
        if self.calibration is None:
            return "modelled"
        value = getattr(self.calibration, curve)
        present = value.get(self.dtype) if isinstance(value, dict) else value
        return "measured" if present else "modelled"

    @property
    def bandwidth(self) -> float:
        """Device memory, bytes/s."""
        curve = self.calibration.copy_bytes_per_s if self.calibration else ()
        return rate_at(curve, 1e9) or self.device.memory_bandwidth_bytes_per_s

    @property
    def launch_s(self) -> float:
        measured = self.calibration.launch_overhead_s if self.calibration else None
        return self.device.launch_overhead_s if measured is None else measured

    def gemm_s(self, flops: Any, traffic_bytes: Any, rows: Any) -> Any:
        """Dense product: the slower of computing and moving."""
        rate = self._measured("gemm_flops", rows)
        if rate is None:
            rate = flops_rate(self.device, self.dtype)
        return np.maximum(flops / rate, traffic_bytes / self.bandwidth)

    def grouped_s(self, flops: Any, traffic_bytes: Any, rows_per_expert: Any) -> Any:
        """Grouped product: computing and moving add up (weights of many experts pass once)."""
        measured = self._measured("grouped_gemm_flops", rows_per_expert)
        if measured is not None:
            return flops / measured
        if self.device.type == "cpu":
            rate = CPU_GROUPED_SHARE * flops_rate(self.device, self.dtype)
        else:
            peak = self.device.peak_flops.get(self.dtype)
            rate = GROUPED_SHARE_OF_PEAK * peak if peak else flops_rate(self.device, self.dtype)
        return flops / rate + traffic_bytes / (GROUPED_READ * self.bandwidth)

    def attention_s(self, flops: Any, sequence_tokens: Any) -> Any:
        """Attention scores and their product with values."""
        rate = self._measured("attention_flops", sequence_tokens)
        return flops / (ATTENTION_SHARE * flops_rate(self.device, self.dtype) if rate is None else rate)

    def traffic_s(self, traffic_bytes: Any) -> Any:
        """A memory-bound operator."""
        return traffic_bytes / self.bandwidth

    def gather_copies_s(self, full_bytes: Any) -> Any:
        """What a gather of X bytes costs beside the network: copied out of the flat buffer, read and written.

        On a CPU rank both buffers are taken from the system for each gather, so both are also touched for
        the first time.
        """
        seconds = 2 * full_bytes / self.bandwidth
        return seconds + 2 * full_bytes / self.first_touch if self.device.type == "cpu" else seconds

    @property
    def first_touch(self) -> float:
        """Bytes/s of writing to fresh memory on a CPU rank."""
        measured = self.calibration.first_touch_bytes_per_s if self.calibration else None
        return measured or CPU_FIRST_TOUCH

    def _measured(self, name: str, size: Any) -> Any:
        curves = getattr(self.calibration, name) if self.calibration else {}
        return rate_at(curves.get(self.dtype, ()), size)
