"""Adapters that all experts of a block share: counted once, with the dense weights, in every term that holds them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.cost import estimate
from shardwright.search_spaces.cost.memory_weights import gathered_layer_bytes
from shardwright.search_spaces.cost.plans import plans_of
from shardwright.search_spaces.cost.workload import workload

R, H, I, LAYERS, EXPERTS = 16, 2048, 768, 48, 128
PAIRS = R * ((H + 2 * I) + (I + H))
"""Values of the two shared pairs of a layer."""


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(shard=2), Mesh(ep=2), Mesh(shard=2, ep=4)], ids=Mesh.text)
def test_a_shared_pair_is_kept_once_and_gathered_with_the_dense_weights(build: SimpleNamespace, mesh: Mesh) -> None:
    profile, recipe, strategy = build.qwen3_30b(), build.recipe_of(), ParallelStrategy(mesh=mesh)
    targets = tuple(
        one.model_copy(update={"shared": True}) for one in build.targets_of(profile, rank=R, attention=False)
    )
    assert sum(one.adapter_parameters for one in targets) == LAYERS * PAIRS
    report = estimate(profile, recipe, build.cluster_of("h200-8"), strategy, targets)
    found = {component.name: component.bytes for component in report.memory.components}
    assert found["adapter_parameters"] == 4 * LAYERS * PAIRS / (mesh.shard * mesh.ep)
    plans = plans_of([strategy], profile)
    works = (workload(profile, recipe, one) for one in (targets, ()))
    adapted, bare = (gathered_layer_bytes(work, work.layers[0], plans) for work in works)
    dense, experts = (float(one[0] - other[0]) for one, other in zip(adapted, bare, strict=True))
    assert (dense, experts) == (2 * PAIRS if mesh.shard * mesh.ep > 1 else 0, 0)


def test_its_products_run_on_every_routed_row(build: SimpleNamespace) -> None:
    """Sharing saves memory, not work: ranks, traffic and flops of a row are those of a pair for each expert."""
    profile, recipe = build.qwen3_30b(), build.recipe_of()
    each = build.targets_of(profile, rank=R)
    shared = tuple(one.model_copy(update={"shared": one.kind == "experts"}) for one in each)
    ours, theirs = (workload(profile, recipe, one).layers[0].adapters for one in (shared, each))
    for field in ("expert_ranks", "expert_traffic", "expert_features", "dense_ranks", "experts_in", "experts_out"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.expert_parameters == 0 and theirs.expert_parameters == EXPERTS * PAIRS
    assert ours.dense_parameters - theirs.dense_parameters == PAIRS
