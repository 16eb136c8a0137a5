"""A cluster names every link that its ranks need, and no size contradicts another."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shardwright.schemas.cluster import ClusterRef, ClusterSpec, DeviceSpec, HostSpec, LinkSpec

DEVICE = DeviceSpec(
    name="test",
    type="cuda",
    memory_bytes=100,
    usable_memory_bytes=100,
    peak_flops={"bfloat16": 1.0},
    achievable_flops={"bfloat16": 1.0},
    memory_bandwidth_bytes_per_s=1.0,
)


def links(*names: str) -> tuple[LinkSpec, ...]:
    return tuple(LinkSpec(name=name, bandwidth_bytes_per_s=1.0, latency_s=0.0) for name in names)  # type: ignore[arg-type]


def cluster(devices: int, nodes: int, *names: str, super_node: int = 0) -> ClusterSpec:
    return ClusterSpec(
        name="test",
        device=DEVICE,
        devices_per_node=devices,
        nodes=nodes,
        links=links(*names),
        host=HostSpec(memory_bytes=1, cores=1),
        super_node_devices=super_node,
    )


def test_all_memory_may_be_usable_and_no_more() -> None:
    fields = DEVICE.model_dump() | {"usable_memory_bytes": 101}
    with pytest.raises(ValidationError, match="larger than memory_bytes"):
        DeviceSpec.model_validate(fields)


@pytest.mark.parametrize(
    ("devices", "nodes", "names", "super_node", "message"),
    [
        (2, 1, (), 0, "intra_node is missing"),
        (1, 2, (), 0, "inter_node is missing"),
        (2, 2, ("intra_node",), 0, "inter_node is missing"),
        (2, 2, ("inter_node",), 0, "intra_node is missing"),
        (2, 1, ("intra_node", "intra_node"), 0, "stands twice"),
        (4, 3, ("intra_node", "inter_node", "super_node"), 6, "not a whole number of nodes"),
        (4, 3, ("intra_node", "inter_node"), 8, "super_node is missing"),
    ],
)
def test_a_link_that_is_missing_is_named(
    devices: int, nodes: int, names: tuple[str, ...], super_node: int, message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        cluster(devices, nodes, *names, super_node=super_node)


@pytest.mark.parametrize(
    ("devices", "nodes", "names", "super_node"),
    [
        (1, 1, (), 0),
        (2, 1, ("intra_node",), 0),
        (1, 2, ("inter_node",), 0),
        (4, 3, ("intra_node", "inter_node", "super_node"), 8),
    ],
)
def test_links_that_no_rank_needs_may_be_left_out(
    devices: int, nodes: int, names: tuple[str, ...], super_node: int
) -> None:
    assert cluster(devices, nodes, *names, super_node=super_node).world_size == devices * nodes


@pytest.mark.parametrize(("super_node", "world", "domain"), [(0, 16, 4), (8, 16, 8), (72, 16, 16), (0, 2, 2)])
def test_a_domain_is_a_node_a_super_node_or_the_whole_world(super_node: int, world: int, domain: int) -> None:
    reference = ClusterRef(
        name="test",
        digest="0" * 64,
        device_type="cuda",
        device_name="test",
        world_size=world,
        devices_per_node=4,
        backend="nccl",
        super_node_devices=super_node,
    )
    assert reference.domain_devices == domain
