"""Kimi K3's sizes against recipes and meshes that do not suit them: the broken rule and the nearest legal value."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.legality import violations

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "models.py"


@pytest.fixture(scope="module")
def models() -> Any:
    spec = importlib.util.spec_from_file_location("k3_models", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["k3_models"] = module
    spec.loader.exec_module(module)
    return module


def devices(nodes: int) -> ClusterSpec:
    return ClusterSpec.model_validate({**load_cluster("h200-128").model_dump(), "name": "some", "nodes": nodes})


def rules(profile: CheckpointProfile, recipe: Any, cluster: ClusterSpec, mesh: Mesh) -> dict[str, Any]:
    found = violations(profile, recipe, cluster, ParallelStrategy(mesh=mesh, checkpointing="full"))
    return {one.rule: one for one in found}


def test_ep_must_divide_the_experts(models: Any) -> None:
    """896 experts do not divide by 3; by 8 they do."""
    profile, recipe = models.kimi_k3(), models.recipe_for(batch=24, tokens=4096)
    broken = rules(profile, recipe, devices(3), Mesh(shard=8, ep=3))
    named = next(one for one in broken.values() if "896" in one.message)
    assert "3" in named.message and any(value.endswith(("2", "4")) for value in named.nearest_legal)
    assert not rules(profile, recipe, devices(3), Mesh(shard=3, ep=8))


def test_sequences_stay_within_the_context(models: Any) -> None:
    profile = models.kimi_k3()
    shape = profile.shape.model_copy(update={"max_position_tokens": 1_048_576})
    profile = profile.model_copy(update={"shape": shape})
    mesh = Mesh(shard=2, ep=64)
    longest = models.recipe_for(batch=128, tokens=1_048_576)
    assert "sequence-past-context" not in rules(profile, longest, devices(16), mesh)
    beyond = rules(profile, models.recipe_for(batch=128, tokens=1_048_577), devices(16), mesh)
    assert beyond["sequence-past-context"].nearest_legal == ("batch.sequence_tokens = 1048576",)


def test_images_need_a_vision_tower(models: Any) -> None:
    profile, recipe = models.kimi_k3(), models.recipe_for(batch=128, tokens=4096)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"images_field": "images"})})
    mesh = Mesh(shard=2, ep=64)
    assert "images-without-vision-tower" in rules(profile, recipe, devices(16), mesh)
    counts = profile.parameters.model_copy(update={"by_component": {"vision": 401_214_464}})
    seeing = profile.model_copy(update={"parameters": counts})
    assert "images-without-vision-tower" not in rules(seeing, recipe, devices(16), mesh)
