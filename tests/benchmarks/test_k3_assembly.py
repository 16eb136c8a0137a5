"""The 128-device step from made-up measurements: right where the answer is known, honest where it is not."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import k3_assembly as assembly
from models import kimi_k3, recipe_for, targets_for

from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.cost.fusion import FusedProviders

FUSED = FusedProviders({"kda": ("shardwright", ())})


def kind(name: str, forward: float, backward: float, experts: float, layers: float) -> Any:
    return assembly.KindTime(name, forward, backward, experts, 2 * layers, layers)


KINDS = (kind("a", 1.0, 2.0, 1.5, 10), kind("b", 3.0, 5.0, 0.0, 2))


def measured(name: str, correction: float, spread: float = 0.0) -> Any:
    return assembly.Measured(name, 7.0 * correction, 7.0, spread)


def test_measurements_that_agree_change_nothing() -> None:
    made = assembly.assemble(100.0, 0.0, KINDS, [measured("a", 1), measured("b", 1)])
    assert made.step_ms == 100.0 and made.uncertainty_ms == 0.0


def test_each_kind_is_scaled_by_its_own_measurement() -> None:
    """a: 10 layers of 2 × 1 + 2 = 40 ms, b: 2 of 2 × 3 + 5 = 22 ms."""
    made = assembly.assemble(100.0, 10.0, KINDS, [measured("a", 1.5, 2.0), measured("b", 0.5, 4.0)])
    assert made.step_ms == pytest.approx(100 + 20 - 11)
    sources = {
        "spread": 0.02 * 1.5 * 40 + 0.04 * 0.5 * 22,
        "experts": 0.5 * (1.5 / 3.0) * 40,
        "not_measured": 0.0,
        "communication": 3.0,
    }
    assert made.sources_ms == pytest.approx(sources)
    assert made.uncertainty_ms == pytest.approx(math.sqrt(sum(size**2 for size in sources.values())))
    assert made.low_ms < made.step_ms < made.high_ms


def test_a_kind_that_was_not_measured_takes_the_mean_and_the_range() -> None:
    kinds = (*KINDS, kind("c", 1.0, 1.0, 0.0, 1))
    made = assembly.assemble(100.0, 0.0, kinds, [measured("a", 1.2), measured("b", 0.8)])
    assert made.corrections["c"] == pytest.approx(1.0)
    assert made.sources_ms["not_measured"] == pytest.approx(0.4 * 3)


def test_strange_measurements_are_refused() -> None:
    for given in ([], [measured("z", 1)]):
        with pytest.raises(ValueError, match="not among the plan's"):
            assembly.assemble(1.0, 0.0, KINDS, given)


def test_the_plans_layers_add_up_to_its_computing() -> None:
    """Kinds of the real 128-device plan: their sum is the cost model's own compute terms of layers."""
    model, cluster = kimi_k3("mxfp4"), load_cluster("h200-128")
    work = workload(model, recipe_for(batch=128, tokens=4096), targets_for(model, rank=16))
    strategy = ParallelStrategy(mesh=Mesh(replicate=2, ep=64), checkpointing="full", base_format="mxfp4")
    kinds = assembly.kind_times(work, cluster, strategy, FUSED)
    assert {one.kind: one.backwards for one in kinds} == {"linear+dense": 1, "linear+moe": 68, "mla+moe": 24}
    assert all(one.forwards == 2 * one.backwards for one in kinds)
    report = price(work, cluster, strategy, FUSED)
    outside = ("loss", "head", "embedding", "optimizer")
    terms = [one for one in report.time.components if one.kind == "compute" and not one.name.startswith(outside)]
    layers = sum(one.step_ms for one in kinds)
    named = sum(one.milliseconds for one in terms)
    assert layers == pytest.approx(named, rel=0.02)
    slower = assembly.assemble(report.time.step_ms, 0.0, kinds, [assembly.Measured("linear+moe", 1.1, 1.0, 0.0)])
    assert slower.step_ms == pytest.approx(report.time.step_ms + 0.1 * layers)
