"""Clusters from recorded tool outputs."""

from __future__ import annotations

import pytest

from shardwright.schemas.errors import ClusterError
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.detect import cluster_from, known_device, parse_nvidia_smi, parse_sinfo

H200 = "NVIDIA H200, 143771, 9.0\n" * 8
SINFO = """\
gpu001 128 2063000 gpu:h200:8(S:0-1)
gpu002 128 2063000 gpu:h200:8(S:0-1)
gpu002 128 2063000 gpu:h200:8(S:0-1)
gpu003 96 1031000+ gpu:4
login1 32 250000 (null)
"""


def test_one_node_from_nvidia_smi() -> None:
    found = cluster_from(parse_nvidia_smi(H200))
    assert (found.world_size, found.devices_per_node, found.nodes) == (8, 8, 1)
    assert found.device.memory_bytes == 143_771 << 20
    assert found.device.peak_flops == load_cluster("h200-8").device.peak_flops
    assert found.device.sources["memory_bytes"] == "measured: nvidia-smi, memory.total"


def test_a_partition_from_sinfo() -> None:
    """The most frequent kind of node; a node of two partitions once; the login node not at all."""
    nodes = parse_sinfo(SINFO)
    assert [node.name for node in nodes] == ["gpu001", "gpu002", "gpu003"]
    found = cluster_from(parse_nvidia_smi(H200), nodes)
    assert (found.world_size, found.nodes, found.host.cores) == (16, 2, 128)
    assert found.host.memory_bytes == 2_063_000 << 20
    assert {link.name for link in found.links} == {"intra_node", "inter_node"}


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA GB200", "NVIDIA GB200"),
        ("NVIDIA B200", "NVIDIA B200"),
    ],
)
def test_devices_are_known_by_their_drivers_name(name: str, device: str) -> None:
    found = known_device(name)
    assert found is not None and found.device.name == device


@pytest.mark.parametrize(
    ("smi", "sinfo", "code"),
    [
        ("NVIDIA H200, 143771, 9.0\nNVIDIA H100 80GB HBM3, 81559, 9.0", "", "cluster/mixed-devices"),
        ("Quadro K600, 1024, 3.0", "", "cluster/unknown-device"),
        ("NVIDIA H200, 141 GB, 9.0", "", "cluster/unreadable-nvidia-smi"),
        ("", "", "cluster/unreadable-nvidia-smi"),
        ("NVIDIA H200, 143771, 9.0", SINFO, "cluster/nodes-disagree"),
        (H200, "n1 many 5 gpu:8", "cluster/unreadable-sinfo"),
        (H200, "n1 8 5000 (null)", "cluster/unreadable-sinfo"),
    ],
)
def test_outputs_that_make_no_cluster_are_refused(smi: str, sinfo: str, code: str) -> None:
    with pytest.raises(ClusterError) as error:
        cluster_from(parse_nvidia_smi(smi), parse_sinfo(sinfo) if sinfo else ())
    assert error.value.code == code and error.value.exit_code == 2
