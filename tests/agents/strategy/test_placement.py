"""A measured run's expert loads lead to a plan that says where every expert lives, and that the runtime runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwright.agents.strategy.run import run_search
from shardwright.search_spaces import executable
from shardwright.search_spaces.axes import AXES
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.legality import violations_in
from shardwright.search_spaces.placement import balanced_ranks, imbalance

LAYERS, EXPERTS = 48, 128


def skewed(layer: int) -> tuple[float, ...]:
    """Neighbours share their heat: the first experts, turned by the layer, get most rows."""
    rows = [EXPERTS - (expert + layer) % EXPERTS for expert in range(EXPERTS)]
    return tuple(row**2 / sum(one**2 for one in rows) for row in rows)


def test_measured_loads_place_every_expert(build: SimpleNamespace, tmp_path: Path) -> None:
    profile, recipe, cluster = build.qwen3_30b(), build.recipe_of(batch=64, tokens=4096), build.load_cluster("h200-8")
    # Too little memory for whole experts on each device: the search must spread them.
    cluster = build.with_memory(cluster, 24 << 30)
    loads = tuple(skewed(layer) for layer in range(LAYERS))
    found = run_search(
        profile,
        recipe,
        cluster,
        build.targets_of(profile, rank=8),
        trials=8,
        journal=tmp_path / "study.journal",
        loads=loads,
    )
    best = found.best
    assert best.mesh.ep > 1 and best.expert_placement == "balanced" and len(best.expert_slots) == LAYERS
    places = [tuple(map(int, layer.split(","))) for layer in best.expert_slots]
    each = EXPERTS // best.mesh.ep + best.redundant_experts
    for layer, shares in zip(places, loads, strict=True):
        held = tuple(layer[rank * each : (rank + 1) * each] for rank in range(best.mesh.ep))
        assert held == balanced_ranks(shares, best.mesh.ep, best.redundant_experts)
        assert imbalance(shares, held) == pytest.approx(1, abs=0.1)
    assert all(executable.runs(axis.name, axis.read(best)) for axis in AXES)
    assert violations_in(SearchContext(profile, recipe, cluster), best) == (), "legal without the profile too"
    assert found.cost.feasible and all(not other.strategy.expert_slots for other in found.alternatives)
