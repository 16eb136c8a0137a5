"""The machines: devices, memories, links, storage; and measured curves of them. SI units."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from shardwright.schemas.base import CountInt, Identifier, Model, NonNegative, Positive, PositiveInt, Sha256, added


class DeviceSpec(Model):
    """One accelerator (or one CPU rank)."""

    name: str
    type: Literal["cuda", "cpu", "npu"]
    compute_capability: str = ""
    memory_bytes: PositiveInt
    usable_memory_bytes: PositiveInt
    peak_flops: dict[str, Positive]
    """dtype → dense FLOP/s, datasheet."""
    achievable_flops: dict[str, Positive]
    """dtype → FLOP/s that a large matrix product reaches."""
    memory_bandwidth_bytes_per_s: Positive
    """Achievable device-memory bandwidth, reads plus writes."""
    launch_overhead_s: NonNegative = 5e-6
    """Host time of one kernel of an operator that is called alone."""
    host_launch_s: NonNegative | None = added(None)
    """Host time per kernel in a training pass: modules, autograd, the launch. Absent: ``launch_overhead_s``."""
    unit_overhead_s: NonNegative | None = added(None)
    """Host time of gathering or reducing one FSDP unit once; 0 where absent."""
    beside_slowdown: NonNegative | None = added(None)
    """1 plus the share of a collective's time by which it delays the products beside it; 1.1 where absent."""
    sources: dict[str, str] = {}
    """Field name → where the figure comes from."""

    @model_validator(mode="after")
    def _usable_fits(self) -> DeviceSpec:
        if self.usable_memory_bytes > self.memory_bytes:
            raise ValueError("usable_memory_bytes is larger than memory_bytes")
        return self


class LinkSpec(Model):
    """One level of the network, per rank and direction."""

    name: Literal["intra_node", "super_node", "inter_node"]
    """``super_node``: one load/store domain of several nodes."""
    bandwidth_bytes_per_s: Positive
    latency_s: NonNegative
    source: str = ""


class HostSpec(Model):
    """Memory and cores of one node."""

    memory_bytes: PositiveInt
    cores: PositiveInt


class StorageSpec(Model):
    """Where checkpoints are read from and saved to."""

    read_bytes_per_s: Positive = 1e9
    write_bytes_per_s: Positive = 5e8


class ClusterSpec(Model):
    """A cluster as the search sees it."""

    schema_version: Literal[1] = 1
    name: Identifier
    device: DeviceSpec
    devices_per_node: PositiveInt
    nodes: PositiveInt
    links: tuple[LinkSpec, ...]
    host: HostSpec
    storage: StorageSpec = StorageSpec()
    backend: Literal["nccl", "gloo"] = "nccl"
    software: dict[str, str] = {}
    """Versions on the workers where they differ from the planning machine (``torch``, ``triton``, ``transformers``)."""
    price_per_device_hour: NonNegative | None = None
    super_node_devices: CountInt = added(0)
    """Devices of one load/store domain wider than a node (an NVL72 rack); 0: the node is the domain."""
    rails_per_node: CountInt = added(0)
    """Network cards of a node, shared by its devices; 0: one for each device."""

    @property
    def world_size(self) -> int:
        return self.devices_per_node * self.nodes

    @model_validator(mode="after")
    def _links_cover(self) -> ClusterSpec:
        names = [link.name for link in self.links]
        if len(set(names)) != len(names):
            raise ValueError("a link level stands twice")
        if self.world_size > 1 and self.devices_per_node > 1 and "intra_node" not in names:
            raise ValueError("links: intra_node is missing")
        if self.nodes > 1 and "inter_node" not in names:
            raise ValueError("links: inter_node is missing")
        if self.super_node_devices:
            if self.super_node_devices % self.devices_per_node:
                raise ValueError("super_node_devices is not a whole number of nodes")
            if "super_node" not in names:
                raise ValueError("links: super_node is missing")
        return self


class CurvePoint(Model):
    """One measured point of a curve: size (bytes or rows) and the rate there."""

    size: Positive
    rate: Positive


class Calibration(Model):
    """Measured curves of one machine; plans name it by hash."""

    schema_version: Literal[1] = 1
    device: str
    versions: dict[str, str]
    gemm_flops: dict[str, tuple[CurvePoint, ...]] = {}
    grouped_gemm_flops: dict[str, tuple[CurvePoint, ...]] = {}
    copy_bytes_per_s: tuple[CurvePoint, ...] = ()
    attention_flops: dict[str, tuple[CurvePoint, ...]] = {}
    collectives: dict[str, tuple[CurvePoint, ...]] = {}
    """``all_gather``, ``reduce_scatter``, ``all_to_all``: bytes per rank → bytes/s."""
    launch_overhead_s: NonNegative | None = None
    host_launch_s: NonNegative | None = added(None)
    unit_overhead_s: NonNegative | None = added(None)
    exchange_host_s: tuple[NonNegative, NonNegative] | None = added(None)
    """Host time of one MoE layer's route and exchanges, (forward, backward)."""
    beside_slowdown: NonNegative | None = added(None)
    sustained_flops: dict[str, NonNegative] = added({})
    """dtype → FLOP/s of large products over about a second, under the power limit."""
    first_touch_bytes_per_s: NonNegative | None = added(None)
    """Bytes/s of writing to memory that the allocator just took from the system (page faults); CPU ranks."""
    date: str = ""


class ClusterRef(Model):
    """The cluster inside a decision: what workers must find."""

    name: Identifier
    digest: Sha256
    device_type: Literal["cuda", "cpu", "npu"]
    device_name: str
    world_size: PositiveInt
    devices_per_node: PositiveInt
    backend: Literal["nccl", "gloo"]
    super_node_devices: CountInt = added(0)
    """Devices joined by a wider load/store domain than a node; 0: a node is the domain."""

    @property
    def domain_devices(self) -> int:
        """Neighbouring ranks that reach each other without a network card."""
        return min(max(self.super_node_devices, self.devices_per_node), self.world_size)
