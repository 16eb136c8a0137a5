"""What checks in the interpreter share. Kernels are imported inside, after a check has chosen the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def decided() -> Callable[..., Any]:
    """``decided(pattern, build, shapes, module)`` → the structure agent's decision for one module on an H200."""
    import torch

    from shardwright.agents.structure.join import recertify
    from shardwright.agents.structure.propose import propose
    from shardwright.agents.structure.rank import Target
    from shardwright.agents.structure.testkit import captured_example
    from shardwright.schemas.recipe import BatchSpec, DataSpec, Recipe
    from shardwright.schemas.strategy import Mesh, ParallelStrategy
    from shardwright.search_spaces.catalogue import load_cluster

    def decide(pattern: Any, build: Callable[[], Any], shapes: list[tuple[tuple[int, ...], Any]], module: str) -> Any:
        given = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes)
        captured, graph, facts = captured_example(lambda: (build(), given))
        recipe = Recipe(data=DataSpec(train="a", held_out="b"), batch=BatchSpec(sequence_tokens=4096))
        cluster, profile = load_cluster("h200-1"), None
        target = Target(cluster, profile, recipe, packed={})  # type: ignore[arg-type]
        proposals = propose(pattern.find(captured, graph), facts, target)
        _, (made,) = recertify(proposals, ParallelStrategy(mesh=Mesh()), cluster, recipe)
        assert made.variant == "kernel", made.reason
        return made.model_copy(update={"modules": (module,)})

    return decide
