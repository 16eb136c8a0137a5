"""Collectives and their overlap against hand arithmetic."""

from __future__ import annotations

import pytest

from shardwright.schemas.cluster import Calibration, CurvePoint
from shardwright.schemas.strategy import Mesh
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost.communication import (
    Group,
    Network,
    dense_group,
    expert_group,
    group,
    ramp,
    shard_group,
)
from shardwright.search_spaces.cost.overlap import split_s

H200 = load_cluster("h200-128")
GLOO = load_cluster("cpu-2")


def test_groups_follow_the_mesh_order() -> None:
    """shard 2 × ep 64 on nodes of eight: an EP group spans eight nodes, a shard pair two."""
    mesh = Mesh(shard=2, ep=64)
    assert dense_group(mesh, H200) == Group(128, 8)
    assert expert_group(mesh, H200) == Group(64, 8) and expert_group(mesh, H200).outer == 8
    assert shard_group(mesh, H200) == Group(2, 1) and shard_group(mesh, H200).outer == 2
    assert group(4, 2, 8) == Group(4, 4)


def test_a_gather_inside_a_node() -> None:
    """8 GB over 8 ranks: 7 GB at 0.85·450 GB/s and 8 hops of 4 us."""
    assert Network(H200).all_gather_s(8e9, Group(8, 8)) == pytest.approx(7e9 / (0.85 * 450e9) + 32e-6)


def test_a_gather_over_nodes_is_bound_by_the_nic() -> None:
    """12.8 GB over 8 nodes with 2 ranks each: 7/8·12.8/2 GB through each 50 GB/s NIC, 16 hops of 5 us."""
    seconds = Network(H200).all_gather_s(12.8e9, Group(16, 2))
    assert seconds == pytest.approx(12.8e9 * 7 / 8 / 2 / 50e9 + 16 * 5e-6)


def test_small_messages_do_not_reach_the_bandwidth() -> None:
    assert ramp(1e3) == 0.1 and ramp(4e6) == 0.55 and ramp(64e6) == 1
    assert 0.55 < ramp(10e6) < 1


def test_an_exchange_on_gloo() -> None:
    """1 GB per rank between two: half leaves, at 1 GB/s, two hops of 200 us."""
    assert Network(GLOO).all_to_all_s(1e9, Group(2, 2)) == pytest.approx(0.5 + 4e-4)


def test_an_exchange_over_nodes() -> None:
    """1 GB per rank over 16: 8/16 leave the node at 0.6·50 GB/s."""
    assert Network(H200).all_to_all_s(1e9, Group(16, 8)) == pytest.approx(0.5e9 / 30e9 + 16 * 5e-6)


def test_one_rank_communicates_nothing() -> None:
    assert Network(H200).all_gather_s(1e9, Group(1, 1)) == Network(H200).all_to_all_s(1e9, Group(1, 1)) == 0


def test_measured_collectives_are_used() -> None:
    curve = (CurvePoint(size=1e6, rate=1e9), CurvePoint(size=1e8, rate=3e9))
    network = Network(H200, Calibration(device="h200", versions={}, collectives={"all_gather": curve}))
    assert network.all_gather_s(8e7, Group(8, 8)) == pytest.approx(7e7 / 2e9)
    assert network.origin("all_gather") == "measured" and network.origin("all_to_all") == "modelled"


def test_overlap_hides_what_fits_behind_computation() -> None:
    assert split_s(1.0, 3.0, H200, 1) == pytest.approx((0.1, 1.0))
    assert split_s(3.0, 1.0, H200, 1) == pytest.approx((2.1, 1.0))
    assert split_s(1.0, 3.0, H200, 0) == (1.0, 0.0)
    assert split_s(1.0, 3.0, GLOO, 1) == (1.0, 0.0)
