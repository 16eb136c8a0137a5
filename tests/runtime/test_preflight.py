"""Preflight: every pair is measured once, the slow rank and the bad machine are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.kernels.registry import source_sha256
from shardwright.runtime import record
from shardwright.runtime.device import Device
from shardwright.runtime.preflight import facts, kernels, network
from shardwright.runtime.preflight.network import Pair
from shardwright.runtime.preflight.run import require, warnings
from shardwright.schemas.errors import CheckFailed
from shardwright.schemas.fusion import FusionDecision


@given(st.integers(2, 24))
def test_every_pair_once_and_every_rank_at_most_once_a_round(world: int) -> None:
    seen = [pair for pairs in network.rounds(world) for pair in pairs]
    assert sorted(seen) == [(a, b) for a in range(world) for b in range(a + 1, world)]
    for pairs in network.rounds(world):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


@given(st.integers(3, 12), st.data())
def test_the_one_slow_rank_is_named(world: int, data: st.DataObject) -> None:
    """Pairs with it carry a tenth; it, and nobody else, is told."""
    slow = data.draw(st.integers(0, world - 1))
    pairs = [
        Pair(a, b, 1e8 if slow in (a, b) else data.draw(st.floats(0.9e9, 1.1e9)))
        for a in range(world)
        for b in range(a + 1, world)
    ]
    if world == 3:  # two of three pairs are its own: the usual pair is a slow one
        return
    assert [rank for rank, _ in network.slow_ranks(pairs)] == [slow]


def test_slow_pair_and_wrong_sum_are_told_with_both_sides() -> None:
    pairs = [Pair(0, 1, 1e9), Pair(0, 2, 1e9), Pair(1, 2, 1e9), Pair(0, 3, 1e8), Pair(1, 3, 1e8), Pair(2, 3, 1e8)]
    pairs += [Pair(a, b, 1e9) for a, b in ((0, 4), (1, 4), (2, 4))] + [Pair(3, 4, 1e8)]
    results = network.judge(pairs, 2e8, ["rank 2: all-reduce gave another sum"], list("abcde"), 1e9)
    by_name = {one.name: one for one in results}
    assert not by_name["pair-bandwidth"].passed and by_name["pair-bandwidth"].where == "rank 3 on d"
    assert "100.0 MB/s" in by_name["pair-bandwidth"].evidence and "planned 1000.0" in by_name["pair-bandwidth"].evidence
    assert by_name["collectives-correct"].where == "rank 2"
    with pytest.raises(CheckFailed, match="preflight-collectives-correct"):
        require(tuple(results))
    assert warnings(tuple(results))[0].startswith("preflight pair-bandwidth: rank 3 on d")


def fact(rank: int, **changes: Any) -> facts.Facts:
    usual = facts.Facts(rank, f"host{rank}", record.versions(), "cpu", 1 << 40, 1 << 40, 100.0, ())
    return replace(usual, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("versions", {"versions": {**record.versions(), "torch": "1.0"}}, "has {'torch': '1.0'}"),
        ("memory", {"free_bytes": 5}, "5 free on its host"),
        ("disk", {"disk_free_bytes": 7}, "7 free"),
        ("kernels", {"kernels_unbuilt": ("rms_norm: ptxas failed",)}, "rms_norm: ptxas failed"),
    ],
)
def test_the_bad_machine_is_named(
    name: str, changes: dict[str, Any], told: str, tiny: Any, make_job: Any, strategy: Any
) -> None:
    plan = make_job(tiny, strategy(shard=2)).plan
    results = {one.name: one for one in facts.judge(plan, [fact(0), fact(1, **changes)], 1000)}
    assert [one.name for one in results.values() if not one.passed] == [name]
    assert results[name].where == "rank 1 on host1" and told in results[name].evidence
    with pytest.raises(CheckFailed, match=f"preflight-{name}") as caught:
        require(tuple(results.values()))
    assert caught.value.exit_code == 9


def fused(op: str) -> FusionDecision:
    return FusionDecision(
        proposal_id=op,
        pattern=op,
        variant="kernel",
        provider="shardwright",
        op=op,
        modules=("model.norm",),
        roles={},
        source_sha256=source_sha256("rms_norm"),
        tolerance="0.0001",
    )


def test_one_rank_a_machine_compiles_the_plans_kernels(
    tiny: Any, make_job: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For sm_90 here, with the compiler that a GPU machine has; what does not compile is told with its reason."""
    pytest.importorskip("triton", reason="kernels need triton")
    from shardwright.kernels import compile_gate

    compiled: list[str] = []
    real = compile_gate.compile_case
    monkeypatch.setattr(compile_gate, "compile_case", lambda case, to: compiled.append(case.name) or real(case, to))
    plan = make_job(tiny, strategy(shard=2), fusions=(fused("rms_norm"), fused("no_such_operator"))).plan
    cuda = Device("cuda", torch.device("cpu"), "gloo")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert kernels.unbuilt(plan, cuda) == () and not compiled
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert kernels.unbuilt(plan, Device("cpu", torch.device("cpu"), "gloo")) == () and not compiled
    (told,) = kernels.unbuilt(plan, cuda)
    assert told.startswith("no_such_operator: ") and compiled and all("rms_norm" in name for name in compiled)


def test_clocks_apart_are_a_warning(tiny: Any, make_job: Any, strategy: Any) -> None:
    found = [fact(0), fact(1), fact(2, clock_s=103.5)]
    results = tuple(facts.judge(make_job(tiny, strategy()).plan, found, 0))
    require(results)
    assert warnings(results) == ("preflight clocks: rank 2 on host2: clocks differ by 3.500 s, allowed 1.0 s",)
