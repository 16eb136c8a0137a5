"""The catalogue and users' cluster files."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.schemas.errors import ClusterError
from shardwright.search_spaces.catalogue import cluster_digest, cluster_names, cluster_ref, load_cluster
from shardwright.search_spaces.topology import domain_devices, graph_of, topology_of

NODE = """
name: mine
device: h200-sxm
devices_per_node: 8
nodes: 1
links: [{name: intra_node, bandwidth_bytes_per_s: 4.5e+11, latency_s: 4.0e-6}]
host: {memory_bytes: 1000000000000, cores: 64}
"""


def test_every_shipped_cluster_loads_and_is_named_by_its_file() -> None:
    worlds = {name: load_cluster(name).world_size for name in cluster_names()}
    assert {"cpu-1": 1, "cpu-2": 2, "h200-1": 1, "h200-2": 2, "h200-8": 8, "h200-128": 128}.items() <= worlds.items()
    assert {"gb200-nvl72": 72, "cloudmatrix-384": 384, "h100-64": 64, "mi300x-8": 8}.items() <= worlds.items()
    families = {load_cluster(name).device.name for name in cluster_names()}
    wanted = ("H100", "H200", "B200", "B300", "GB200", "GB300", "A100", "MI300X", "MI355X", "910B", "910C", "cpu")
    assert all(any(part in family for family in families) for part in wanted)
    assert all(load_cluster(name).name == name for name in worlds)


def test_every_figure_of_a_device_has_a_source() -> None:
    for name in cluster_names():
        device = load_cluster(name).device
        figures = {"memory_bytes", "usable_memory_bytes", "peak_flops", "achievable_flops"}
        figures |= {"memory_bandwidth_bytes_per_s", "launch_overhead_s"}
        assert figures <= device.sources.keys(), name
        assert all(text.split(":")[0] in ("measured", "assumed", "datasheet") for text in device.sources.values())
        assert all(link.source for link in load_cluster(name).links)


def test_h200_sizes_are_si_and_not_binary_by_mistake() -> None:
    device = load_cluster("h200-1").device
    assert device.usable_memory_bytes / 2**30 == pytest.approx(139.8, abs=1e-6)
    assert device.memory_bytes == 143_771 * 2**20


def test_a_users_file_may_name_a_catalogue_device(write_cluster: Callable[[str], str]) -> None:
    assert load_cluster(write_cluster(NODE)).device == load_cluster("h200-8").device


@pytest.mark.parametrize(
    ("old", "new", "code", "found"),
    [
        ("nodes: 1", "nodes: 1\ncolour: red", "cluster/invalid", "colour: unknown key"),
        ("1000000000000", "-1", "cluster/invalid", "host.memory_bytes"),
        ("devices_per_node: 8", "devices_per_node: 0", "cluster/invalid", "devices_per_node"),
        ("h200-sxm", "h300", "cluster/unknown-device", "h300"),
        ("nodes: 1", "nodes: 2", "cluster/invalid", "inter_node is missing"),
        ("name: mine", "name: [", "cluster/unreadable", "YAML"),
        ("4.5e+11", "'450 GB'", "cluster/invalid", "links.0.bandwidth_bytes_per_s"),
    ],
)
def test_wrong_files_are_refused_by_field(
    write_cluster: Callable[[str], str], old: str, new: str, code: str, found: str
) -> None:
    path = write_cluster(NODE.replace(old, new))
    with pytest.raises(ClusterError) as error:
        load_cluster(path)
    assert error.value.code == code
    assert found in error.value.what
    assert error.value.where == path
    assert error.value.exit_code == 2


def test_a_file_that_is_not_a_mapping_is_refused(write_cluster: Callable[[str], str]) -> None:
    with pytest.raises(ClusterError, match="found list"):
        load_cluster(write_cluster("- 1"))


def test_an_unknown_name_lists_the_catalogue() -> None:
    with pytest.raises(ClusterError) as error:
        load_cluster("h200-9000")
    assert error.value.code == "cluster/unknown-cluster"
    assert "h200-8" in error.value.next_action


def test_the_digest_follows_content(write_cluster: Callable[[str], str]) -> None:
    one, same = load_cluster(write_cluster(NODE)), load_cluster(write_cluster(NODE + "\n# a comment\n"))
    other = load_cluster(write_cluster(NODE.replace("cores: 64", "cores: 65")))
    assert cluster_digest(one) == cluster_digest(same) != cluster_digest(other)
    ref = cluster_ref(one)
    assert (ref.digest, ref.world_size, ref.device_type) == (cluster_digest(one), 8, "cuda")


def test_a_rack_is_one_domain_and_its_trays_are_nodes() -> None:
    rack, pod = load_cluster("gb200-nvl72"), load_cluster("h200-128")
    assert domain_devices(rack) == 72 and domain_devices(pod) == 8
    assert topology_of(rack).inner.bandwidth_bytes_per_s == 9e11
    assert topology_of(pod).inner.bandwidth_bytes_per_s == 4.5e11
    assert topology_of(pod).outer.bandwidth_bytes_per_s == 5e10


def test_devices_that_share_a_rail_share_its_bandwidth() -> None:
    """Two cards for eight devices: 50 GB/s over four."""
    shared = load_cluster("h200-128").model_copy(update={"rails_per_node": 2})
    assert topology_of(shared).outer.bandwidth_bytes_per_s == 5e10 / 4
    graph = graph_of(shared)
    assert {node.split()[0] for node in graph} == {"device", "switch", "rail", "spine"}
    assert sum(node.startswith("rail") for node in graph) == 4


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("nodes: 1", "nodes: 1\nsuper_node_devices: 12", "not a whole number of nodes"),
        ("nodes: 1", "nodes: 1\nsuper_node_devices: 16", "super_node is missing"),
        ("host: {memory_bytes: 1000000000000", "host: {memory_gb: 1000", "memory_gb"),
    ],
)
def test_wrong_domains_and_other_units_are_refused(
    write_cluster: Callable[[str], str], old: str, new: str, found: str
) -> None:
    with pytest.raises(ClusterError) as error:
        load_cluster(write_cluster(NODE.replace(old, new)))
    assert found in error.value.what
