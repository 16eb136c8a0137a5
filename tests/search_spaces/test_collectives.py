"""Every collective's formula worked by hand, with no two factors alike, so that no other formula gives the value.

Links of ``h200-128``: 4 us and 450 GB/s inside a node of eight, 5 us and 50 GB/s between nodes.
"""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from shardwright.schemas.cluster import Calibration, CurvePoint
from shardwright.schemas.strategy import Mesh
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost.communication import (
    Group,
    Network,
    distinct_domains,
    expert_group,
    group,
    node_groups,
    ramp,
    replica_group,
    shard_group,
)

H200 = load_cluster("h200-128")
NETWORK = Network(H200)
INSIDE = 0.85 * 450e9
"""What gathers reach inside a node, bytes/s."""


@pytest.mark.parametrize(
    ("size", "stride", "inner", "outer"), [(2, 1, 2, 1), (8, 3, 2, 4), (4, 16, 1, 4), (6, 2, 4, 2), (4, 8, 1, 4)]
)
def test_ranks_of_a_group_inside_a_domain(size: int, stride: int, inner: int, outer: int) -> None:
    found = group(size, stride, 8)
    assert (found.size, found.inner, found.outer) == (size, inner, outer)


def test_groups_stand_as_far_apart_as_the_axes_inside_them() -> None:
    assert replica_group(Mesh(replicate=4, ep=2), H200) == Group(4, 4)
    assert replica_group(Mesh(replicate=4, shard=2, ep=2), H200) == Group(4, 2)
    assert replica_group(Mesh(replicate=4, tp=8), H200) == Group(4, 1)
    assert replica_group(Mesh(replicate=4, cp=3), H200) == Group(4, 2)
    assert expert_group(Mesh(ep=8, cp=2), H200) == Group(8, 4)
    assert shard_group(Mesh(shard=4, ep=2, tp=2), H200) == Group(8, 4)
    assert node_groups(Mesh(shard=2, ep=64), H200) == (Group(8, 8), Group(1, 1))  # type: ignore[arg-type]


def test_an_all_reduce_is_a_tree_for_small_tensors_and_a_ring_for_large_ones() -> None:
    """8 ranks of a node: 2·3 hops and twice the bytes, or twice a gather; 16 ranks of two nodes: 2·4 hops of 5 us."""
    eight = Group(8, 8)
    assert NETWORK.all_reduce_s(8e3, eight) == pytest.approx(6 * 4e-6 + 16e3 / INSIDE)
    assert NETWORK.all_reduce_s(8e9, eight) == pytest.approx(2 * (8 * 4e-6 + 7e9 / INSIDE))
    assert NETWORK.all_reduce_s(16e3, Group(16, 8)) == pytest.approx(8 * 5e-6 + 32e3 / 50e9)
    assert NETWORK.all_reduce_s(8e3, Group(6, 6)) == pytest.approx(6 * 4e-6 + 16e3 / INSIDE), "log2(6) rounded up"
    assert NETWORK.all_reduce_s(0.0, eight) == NETWORK.all_reduce_s(8e3, Group(1, 1)) == 0


def test_two_levels_gather_small_tensors_over_nodes() -> None:
    """16 KB over two nodes: a rail of two hops at a tenth of the NIC's rate, then eight hops inside; a ring has 16."""
    rails, inside = 2 * 5e-6 + 16e3 / 16 / 50e9 / 0.1, 8 * 4e-6 + 14e3 / INSIDE
    assert NETWORK.all_gather_s(16e3, Group(16, 8)) == pytest.approx(rails + inside)


def test_an_exchange_inside_a_node_and_a_measured_one() -> None:
    assert NETWORK.all_to_all_s(1e9, Group(8, 8)) == pytest.approx(8 * 4e-6 + 0.875e9 / (0.6 * 450e9))
    curve = (CurvePoint(size=1e6, rate=1e9), CurvePoint(size=1e8, rate=3e9))
    measured = Network(H200, Calibration(device="h200", versions={}, collectives={"all_to_all": curve}))
    assert measured.all_to_all_s(1e8, Group(4, 4)) == pytest.approx(0.75e8 / 3e9)


def test_an_exchange_in_two_stages_is_bound_by_the_nic_or_by_the_node() -> None:
    """1 GB over two nodes of eight. Of 4 experts among 64 a token has one beyond its node in 1 − C(32,4)/C(64,4)."""
    start, sixteen = 2 * 5e-6 + 8 * 4e-6, Group(16, 8)
    beyond = 1e9 / 4 * (1 - comb(32, 4) / comb(64, 4)) / (0.9 * 50e9)
    assert NETWORK.hierarchical_exchange_s(1e9, sixteen, 64, 4) == pytest.approx(start + beyond)
    within = 1e9 * 7 / 8 / (0.6 * 450e9)
    assert NETWORK.hierarchical_exchange_s(1e9, sixteen, 64, 16) == pytest.approx(start + within)
    inside = NETWORK.hierarchical_exchange_s(1e9, Group(8, 8), 64, 4)
    assert inside == NETWORK.all_to_all_s(1e9, Group(8, 8)), "one node has one stage"
    columns = Group(np.array([16, 8, 16]), np.array([8, 8, 8]))
    found = NETWORK.hierarchical_exchange_s(np.array([1e9, 1e9, 0.0]), columns, 64, 4)
    assert found == pytest.approx([start + beyond, inside, 0.0])


@pytest.mark.parametrize(
    ("domains", "experts", "top", "expected"),
    [
        (1, 64, 8, 1.0),
        (2, 64, 1, 1.0),
        (4, 8, 7, 4.0),
        (4, 8, 6, 4 * (1 - comb(6, 6) / comb(8, 6))),
        (16, 384, 8, 16 * (1 - comb(360, 8) / comb(384, 8))),
    ],
)
def test_domains_of_a_token(domains: int, experts: int, top: int, expected: float) -> None:
    assert distinct_domains(domains, experts, top) == pytest.approx(expected, rel=1e-12)


def test_one_message() -> None:
    assert NETWORK.send_s(1e6, True) == pytest.approx(5e-6 + 1e6 / 50e9)
    assert NETWORK.send_s(1e6, False) == pytest.approx(4e-6 + 1e6 / 450e9)
    assert NETWORK.send_s(1e6, np.array([True, False])) == pytest.approx([2.5e-5, 4e-6 + 1e6 / 450e9])


def test_the_ramp_is_linear_in_the_logarithm() -> None:
    """Halfway, in logarithms, from 4 MB (0.55) to 32 MB (1.0); nothing is below the first point."""
    assert ramp((4e6 * 32e6) ** 0.5) == pytest.approx((0.55 + 1.0) / 2)
    assert ramp(0.0) == 0.1
    assert ramp(np.array([128e3, 32e6, 1e12])) == pytest.approx([0.1, 1.0, 1.0])
