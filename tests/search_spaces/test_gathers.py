"""Gathered weights alive at once: by hand on short stacks of unlike layers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.cost.gathers import gather_peaks, layer_order
from shardwright.search_spaces.cost.plans import plans_of


def plans(build: SimpleNamespace, *depths: int):
    made = [ParallelStrategy(mesh=Mesh(shard=8), prefetch_depth=depth) for depth in depths]
    return plans_of(made, build.qwen3_30b())


@pytest.mark.parametrize(
    ("depth", "forward", "backward"),
    [
        # Forward: the 7 of layer 0 still flat while layer 1 stands flat and whole, or layer 0 itself: 2 · 7.
        (1, 14, 14),
        # Layer 0 flat and whole, two layers of 2 ahead; in backward layer 0 alone is more than 2 + (2 + 7).
        (2, 18, 14),
        (4, 20, 14),
    ],
)
def test_a_large_first_layer_stands_beside_what_is_gathered_with_it(build, depth, forward, backward) -> None:
    table = plans(build, depth)
    large, small = np.array([7.0]), np.array([2.0])
    found = gather_peaks([large, small], (0, 1, 1, 1), table)
    assert (found.forward[0], found.backward[0], found.first[0]) == (forward, backward, 14)


def test_equal_layers_give_three_in_forward_and_two_in_backward(build) -> None:
    """Depth 1; each layer gathered further ahead adds one to both."""
    found = gather_peaks([np.ones(3)], (0,) * 12, plans(build, 1, 2, 4))
    assert found.forward.tolist() == [3, 4, 6] and found.backward.tolist() == [2, 3, 5]


def test_the_order_of_kinds_is_that_of_the_layers(build) -> None:
    work = SimpleNamespace(
        layers=[SimpleNamespace(kind=SimpleNamespace(layer_indices=indices)) for indices in ((0, 3), (1, 2))]
    )
    assert layer_order(work) == (0, 1, 1, 0)
