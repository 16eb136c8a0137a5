"""Counted work into time: the only place where an OpCost meets a device.

Legend: T tokens on a rank, R routed rows on a rank, H hidden, I expert width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.kernels.packed_experts.configs import PIECES
from shardwright.kernels.permute.configs import TILE_ROWS
from shardwright.schemas.cluster import Calibration, ClusterSpec, CurvePoint, DeviceSpec
from shardwright.schemas.errors import ClusterError
from shardwright.schemas.ops import EvidenceOrigin, OpCost, PassCost
from shardwright.search_spaces.calibration import rate_at
from shardwright.search_spaces.cost.overlap import SLOWDOWN

GROUPED_SHARE_OF_PEAK = 0.64
"""Grouped products reach this share of the datasheet peak once weight and row traffic is added:
fit of four H200 points (73–512 rows per expert), largest error 6 %."""

GROUPED_READ = 1.13
"""Weights stream this much faster than a copy moves bytes: 4.8 against 4.25 TB/s in the same fit."""

ATTENTION_SHARE = 0.5
"""Causal attention over a large matrix product: flash attention in torch 2.11 on one H200 reached
330–348 TFLOP/s forward against 693."""

ATTENTION_BACKWARD = {"cpu": 2.5, "cuda": 3.0}
"""Backward over forward time of an attention kernel: 2.5 times the flops, on a GPU at 0.83 of the forward's rate. In
profiles of one H200 (torch 2.11, cuDNN, 32 heads of 128, 4,096 tokens) 2.89 ms after 0.956 at four sequences."""

MASKED_ATTENTION_SHARE = 0.25
"""Attention under a mask of all pairs over a large matrix product, on a GPU: between 64 and 128 heads of 192 + 128 at
8,192 tokens the measured eager forward grows by 15.7 ms on one H200, 175 TFLOP/s. No pair is skipped."""

ATTENTION_BACKWARD_BYTES = {"cpu": 0, "cuda": 14}
"""Bytes a value of q that its helper kernels move in backward: the dot of output and gradient, the query's gradient
from fp32, and the sum of key and value gradients over a group's heads."""

TILED_SHARE, TILED_ROWS = 0.96, TILE_ROWS
"""Our grouped products on a GPU: share of the library's best rate that they reach once the rows of an expert are
rounded up to whole tiles, for a tile with fewer takes as long. Alone on one H200 (cases ``moe/k3-ep64``, ``256e8``,
``128e8``, ``896e16``: 4,681, 256, 512 and 146 rows an expert) 686, 693, 650 and 607 TFLOP/s beside 689; in a profile of
a training step, 1,024 rows, 666 beside 693 that last."""

PIECED_SHARE, PIECED_ROWS = 0.67, 32
"""The same of the product for few rows, whose tiles are cut into smaller pieces: 462 TFLOP/s at 256 rows an expert
(case ``moe/256e8``, of which it takes 25.2 ms where the other takes 24.3)."""

DECODED_SHARE = 0.54
"""The same of products that decode packed weights tile by tile: cases ``moe-mxfp4/k3-ep64-2k`` (forward, dx) and
``-4k`` (forward) reach 360, 346 and 412 TFLOP/s beside 689."""

ADAPTER_GRADIENT_SHARE = 0.55
"""Bandwidth that the kernels of expert adapters' gradients reach: in that profile they move 2.1 GB in 0.94 ms."""

CHAIN_SHARE = {"cpu": 1.0, "cuda": 0.70}
"""Bandwidth of an eager norm over a copy's: it is a chain of casts, reductions and products with one value a row. On
one H200 (16,384 × 7,168, case ``rmsnorm/16kx7168``) 36 bytes a value in 1.474 ms forward, 76 in 2.95 backward."""

HEAD_CHAIN_SHARE = {"cpu": 1.0, "cuda": 0.58}
"""The same of norms over heads with their rotation, whose tensors are strided: 2.40 TB/s forward and 2.52 backward in
case ``qk-norm-rope/8kx32x4x128``."""

TORCH_ADAPTER_SHARE = {"cpu": 1.0, "cuda": 0.8}
"""The same of adapters on experts by torch: in case ``moe-lora/128e8`` they add 3.19 GB and 0.965 ms to a forward."""

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

    @property
    def host_launch_s(self) -> float:
        """Host time per kernel in a training pass; that of an operator alone where nothing else is known."""
        measured = self.calibration.host_launch_s if self.calibration else None
        known = self.device.host_launch_s if measured is None else measured
        return self.launch_s if known is None else known

    @property
    def unit_s(self) -> float:
        """Host time of one gather or reduction of an FSDP unit."""
        measured = self.calibration.unit_overhead_s if self.calibration else None
        return (self.device.unit_overhead_s or 0.0) if measured is None else measured

    @property
    def exchange_host_s(self) -> tuple[float, float] | None:
        """Host time of one MoE layer's exchanges, (forward, backward), where it was measured."""
        return self.calibration.exchange_host_s if self.calibration else None

    @property
    def slowdown(self) -> float:
        """1 plus the share of a collective's time by which it delays what is computed meanwhile."""
        measured = self.calibration.beside_slowdown if self.calibration else None
        return (self.device.beside_slowdown or SLOWDOWN) if measured is None else measured

    def gemm_s(self, flops: Any, traffic_bytes: Any, rows: Any) -> Any:
        """Dense product: the slower of computing and moving."""
        rate = self._measured("gemm_flops", rows)
        rate = flops_rate(self.device, self.dtype) if rate is None else np.minimum(rate, self._sustained)
        return np.maximum(flops / rate, traffic_bytes / self.bandwidth)

    @property
    def _sustained(self) -> float:
        """What large products reach for as long as a step takes.

        The curve's points are a few calls each; over seconds the power limit lowers the clock (on one H200 790 TFLOP/s
        become 693). An older calibration did not measure that; the catalogue's figure stands for it.
        """
        if self.device.type == "cpu":
            return float("inf")
        measured = self.calibration.sustained_flops if self.calibration else {}
        return measured.get(self.dtype, flops_rate(self.device, self.dtype))

    def grouped_s(self, flops: Any, traffic_bytes: Any, rows_per_expert: Any, *, library: bool = False) -> Any:
        """Grouped product: computing and moving add up (weights of many experts pass once).

        Args:
            library: torch's own, over groups of uneven size: at least what the fit of such groups says, where the curve
                is of equal groups at one width.
        """
        measured = self._measured("grouped_gemm_flops", rows_per_expert)
        if measured is not None and not (library and self.device.type != "cpu"):
            return flops / measured
        if self.device.type == "cpu":
            rate = CPU_GROUPED_SHARE * flops_rate(self.device, self.dtype)
        else:
            peak = self.device.peak_flops.get(self.dtype)
            rate = GROUPED_SHARE_OF_PEAK * peak if peak else flops_rate(self.device, self.dtype)
        fitted = flops / rate + traffic_bytes / (GROUPED_READ * self.bandwidth)
        return fitted if measured is None else np.maximum(fitted, flops / measured)

    def _best_grouped(self) -> float:
        """The highest rate of grouped products that lasts."""
        curve = self.calibration.grouped_gemm_flops.get(self.dtype, ()) if self.calibration else ()
        peak = self.device.peak_flops.get(self.dtype)
        known = GROUPED_SHARE_OF_PEAK * peak if peak else flops_rate(self.device, self.dtype)
        return min(max((point.rate for point in curve), default=known), self._sustained)

    def tiled_s(self, flops: Any, traffic_bytes: Any, rows_per_expert: Any) -> Any:
        """A grouped product of ours: the slower of moving, and of computing whole tiles by the better of two kernels.

        On a CPU, where no kernel runs, torch's.
        """
        if self.device.type == "cpu":
            return self.grouped_s(flops, traffic_bytes, rows_per_expert)
        ways = ((TILED_SHARE, TILED_ROWS), (PIECED_SHARE, PIECED_ROWS))
        whole, pieced = (rounded_up(rows_per_expert, rows) / (share * self._best_grouped()) for share, rows in ways)
        return np.maximum(flops * np.minimum(whole, pieced), traffic_bytes / (GROUPED_READ * self.bandwidth))

    def decoded_s(self, flops: Any, traffic_bytes: Any, rows_per_expert: Any) -> Any:
        """The same of packed weights, decoded in every tile; the kernel's tile leaves the fewest rows empty."""
        if self.device.type == "cpu":
            return self.grouped_s(flops, traffic_bytes, rows_per_expert)
        mean = np.maximum(1.0, np.ceil(rows_per_expert))
        sizes = [piece.rows for piece in reversed(PIECES)]
        held = [np.ceil(mean / size) * size for size in sizes]
        least = np.minimum.reduce(held)
        tile = np.select([one == least for one in held], sizes)
        seconds = flops * rounded_up(rows_per_expert, tile) / (DECODED_SHARE * self._best_grouped())
        return np.maximum(seconds, traffic_bytes / (GROUPED_READ * self.bandwidth))

    def attention_s(self, flops: Any, sequence_tokens: Any) -> Any:
        """Attention scores and their product with values."""
        rate = self._measured("attention_flops", sequence_tokens)
        return flops / (ATTENTION_SHARE * flops_rate(self.device, self.dtype) if rate is None else rate)

    def masked_attention_s(self, flops: Any, sequence_tokens: Any) -> Any:
        """Attention under a mask: another kernel than causal attention's, on a GPU a slower one."""
        if self.device.type == "cpu":
            return self.attention_s(flops, sequence_tokens)
        return flops / (MASKED_ATTENTION_SHARE * flops_rate(self.device, self.dtype))

    def wide_gemm_s(self, flops: Any, traffic_bytes: Any) -> Any:
        """A product in fp32, which no tensor core speeds up."""
        wide = "float32" if "float32" in self.device.achievable_flops else self.dtype
        return np.maximum(flops / flops_rate(self.device, wide), traffic_bytes / self.bandwidth)

    def attention_backward_s(self, forward_s: Any, query_values: Any) -> Any:
        """Its backward, of as many values of q."""
        kind = "cpu" if self.device.type == "cpu" else "cuda"
        helpers = self.traffic_s(ATTENTION_BACKWARD_BYTES[kind] * query_values)
        return ATTENTION_BACKWARD[kind] * forward_s + helpers

    def traffic_s(self, traffic_bytes: Any) -> Any:
        """A memory-bound operator."""
        return traffic_bytes / self.bandwidth

    def chain_s(self, traffic_bytes: Any, share: dict[str, float] = CHAIN_SHARE) -> Any:
        """A chain of eager operators that reaches a share of a copy's bandwidth."""
        return traffic_bytes / (share["cpu" if self.device.type == "cpu" else "cuda"] * self.bandwidth)

    def gather_input_s(self, full_bytes: Any, ranks: Any) -> Any:
        """What a rank does before a gather of X bytes: its own part copied into the flat buffer, ``2·X/n`` moved."""
        return np.where(ranks > 1, 2 * full_bytes / ranks / self.bandwidth, 0.0)

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
        curve = curves.get(self.dtype, ())
        if self.device.type != "cpu" and name in CALL_POWER:
            curve = without_call(curve, CALL_POWER[name])
        return rate_at(curve, size)


def rounded_up(rows: Any, tile: Any) -> Any:
    """Rows of whole tiles over rows, of experts that have ``rows`` on average: half of the last tile is empty, and an
    expert with any row has a tile."""
    filled = np.maximum(rows, 1e-9)
    some = np.minimum(1.0, filled)
    return np.maximum(some, filled / tile + some / 2) * tile / filled


CALL_POWER = {"gemm_flops": 3, "attention_flops": 2}
"""Curves whose points are times of one call that was waited for, and the power of size that its flops grow with."""


def without_call(curve: tuple[CurvePoint, ...], power: int) -> tuple[CurvePoint, ...]:
    """A curve of kernels' own rates, from one of calls that the host made and waited for one at a time.

    A call's time is what the host takes for it plus flops over a rate. In a step the host runs ahead, and its time is
    counted apart (``cost.host``), so it is taken out here: it is what the line through the two smallest points leaves
    at no flops. No rate exceeds the largest that was measured.
    """
    points = sorted(curve, key=lambda point: point.size)
    if len(points) < 2:
        return curve
    work = [point.size**power for point in points]
    spent = [flops / point.rate for flops, point in zip(work, points, strict=True)]
    call = max(0.0, (spent[0] * work[1] - spent[1] * work[0]) / (work[1] - work[0]))
    highest = max(point.rate for point in points)
    return tuple(
        CurvePoint(size=point.size, rate=min(highest, flops / (time - call)) if time > call else highest)
        for point, flops, time in zip(points, work, spent, strict=True)
    )
