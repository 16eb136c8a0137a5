"""Published full-training memory and the sizes of published models."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import workload
from shardwright.search_spaces.cost.full_training import Layout, stage_bytes
from shardwright.search_spaces.legality import violations_in

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_models", BENCHMARKS / "models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("kimi_k3", 2_779_484_478_208),
        ("kimi_linear", 49_122_675_072),
        ("deepseek_v3", 671_026_404_352),
        ("glm_5", 743_911_199_232),
        ("qwen3_30b", 30_532_122_624),
    ],
)
def test_shapes_count_to_the_published_totals(models: ModuleType, name: str, total: int) -> None:
    assert getattr(models, name)().parameters.total == total


@pytest.mark.parametrize(
    ("model", "layout", "measured_gib"),
    [
        ("deepseek_v3", Layout(8, 8), 104.30),
        ("deepseek_v3", Layout(4, 4, 2, 4), 114.00),
        ("deepseek_v2", Layout(8, 8), 45.63),
        ("deepseek_v2", Layout(4, 4, 2, 4), 44.70),
    ],
)
def test_published_rows_on_eight_b200_within_two_percent(
    models: ModuleType, model: str, layout: Layout, measured_gib: float
) -> None:
    """SimuMax v1.2: four layers, 4,096 tokens, ZeRO-1, balanced routing; the fullest stage."""
    work = workload(getattr(models, model)(4, 1), models.recipe_for(batch=8, tokens=4096), ())
    peak = max(sum(stage_bytes(work, layout, 4096, stage).values()) for stage in range(layout.stages))
    assert peak / 2**30 == pytest.approx(measured_gib, rel=0.02)


def test_a_stage_without_the_loss_is_full_in_its_backward(models: ModuleType) -> None:
    """The first of two stages holds 71.24 GiB: two micro-batches in flight, and what a MoE layer's backward needs."""
    work = workload(models.deepseek_v3(4, 1), models.recipe_for(batch=8, tokens=4096), ())
    first, last = (stage_bytes(work, Layout(4, 4, 2, 4), 4096, stage) for stage in (0, 1))
    assert sum(first.values()) / 2**30 == pytest.approx(71.24, rel=0.02)
    assert first["loss"] == 0 < first["workspace"] and last["workspace"] == 0 < last["loss"]


def test_k3_on_128_ranks_with_64_expert_ranks_is_legal(models: ModuleType) -> None:
    context = SearchContext(
        models.kimi_k3(), models.recipe_for(batch=256, tokens=4096), load_cluster("h200-128"), explore=True
    )
    plan = ParallelStrategy(mesh=Mesh(shard=2, ep=64), accumulation_steps=2, checkpointing="full")
    assert violations_in(context, plan) == ()
