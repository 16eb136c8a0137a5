"""Degrees of parallelism are bounded."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shardwright.schemas.strategy import Mesh, ParallelStrategy


@pytest.mark.parametrize("axis", ["replicate", "shard", "ep", "tp", "cp", "pp", "expert_tp"])
def test_a_degree_has_a_bound(axis: str) -> None:
    """Rules count through degrees; 10^30 of them would never end."""
    assert getattr(Mesh(**{axis: 2**20}), axis) == 2**20
    with pytest.raises(ValidationError, match="1048576"):
        Mesh(**{axis: 10**30})


def test_ranks_are_the_product_of_the_degrees() -> None:
    """Different primes: no sum, and no other product, gives these numbers. ``expert_tp`` takes ranks of others."""
    mesh = Mesh(replicate=2, shard=3, ep=5, tp=7, cp=11, pp=13, expert_tp=3)
    assert mesh.world_size == 2 * 3 * 5 * 7 * 11 * 13
    assert mesh.data_ranks == 30
    assert mesh.text() == "replicate2·shard3·ep5·tp7·cp11·pp13·etp3"
    assert Mesh(shard=2).text() == "replicate1·shard2·ep1"
    assert Mesh(cp=2).text() == "replicate1·shard1·ep1·cp2"
    plan = ParallelStrategy(mesh=mesh, micro_batch_sequences=17, accumulation_steps=19)
    assert plan.global_batch_sequences() == 30 * 17 * 19


def test_a_label_names_what_differs_from_the_defaults() -> None:
    mesh = Mesh(shard=2)
    assert ParallelStrategy(mesh=mesh).text() == "replicate1·shard2·ep1 mb1×1 no-ckpt reshard"
    other = ParallelStrategy(
        mesh=mesh,
        checkpointing="layers",
        checkpointed_layers=(0, 2),
        reshard_scope="node",
        prefetch_depth=2,
        expert_padding_tokens=8,
        overlap="chunked",
        overlap_chunks=2,
        dispatch="hierarchical",
        offload="adapter_optimizer",
        base_format="fp8",
        expert_placement="balanced",
        redundant_experts=1,
    )
    assert other.text() == (
        "replicate1·shard2·ep1 mb1×1 ckpt-2-layers node-reshard prefetch2 pad8 chunks2 hierarchical "
        "offload-adapter_optimizer fp8 balanced redundant1"
    )
    kept = ParallelStrategy(mesh=mesh, checkpointing="full", reshard_after_forward=False, overlap="shared")
    assert kept.text() == "replicate1·shard2·ep1 mb1×1 ckpt keep shared-under-dispatch"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefetch_depth": 9}, "gathers more than it hides"),
        ({"checkpointing": "layers"}, "named exactly when"),
        ({"checkpointed_layers": (1,)}, "named exactly when"),
        ({"checkpointing": "layers", "checkpointed_layers": (2, 1)}, "ascending, each once"),
        ({"checkpointing": "layers", "checkpointed_layers": (1, 1)}, "ascending, each once"),
        ({"overlap": "chunked"}, "above 1 when overlap is chunked"),
        ({"overlap_chunks": 2}, "above 1 when overlap is chunked"),
        ({"expert_slots": ("1,0",)}, "only where expert_placement is balanced"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ParallelStrategy(mesh=Mesh(), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"prefetch_depth": 8},
        {"checkpointing": "layers", "checkpointed_layers": (1, 2)},
        {"overlap": "shared", "overlap_chunks": 2},
        {"overlap": "shared"},
        {"expert_placement": "balanced", "expert_slots": ("1,0",)},
    ],
)
def test_the_nearest_that_do_are_taken(fields: dict[str, object]) -> None:
    plan = ParallelStrategy(mesh=Mesh(), **fields)  # type: ignore[arg-type]
    assert {name: getattr(plan, name) for name in fields} == fields
