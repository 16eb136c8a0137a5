"""Where experts go by measured loads: every expert has a place, and the price is that of the places."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost.routing import placed_imbalance
from shardwright.search_spaces.legality import violations_in
from shardwright.search_spaces.placement import balanced_ranks, copies_of, imbalance, misplaced, with_places

HOT = (0.4, 0.2, 0.2, 0.05, 0.05, 0.05, 0.03, 0.02)


@given(
    weights=st.lists(st.integers(0, 50), min_size=4, max_size=24).filter(lambda w: sum(w) > 0),
    ep=st.sampled_from([2, 3, 4, 6]),
    redundant=st.integers(0, 4),
)
@example(weights=[1, 1, 1, 1, 1, 17], ep=3, redundant=2)  # all free ranks hold the last copy's expert: an exchange
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_expert_has_a_place_and_none_two_on_a_rank(weights: list[int], ep: int, redundant: int) -> None:
    weights = weights[: len(weights) // ep * ep]
    if not sum(weights):
        return
    each = len(weights) // ep
    redundant = min(redundant, each)
    shares = tuple(weight / sum(weights) for weight in weights)
    ranks = balanced_ranks(shares, ep, redundant)
    assert [len(set(held)) for held in ranks] == [each + redundant] * ep
    assert {expert for held in ranks for expert in held} == set(range(len(shares)))
    held = [sum(expert in one for one in ranks) for expert in range(len(shares))]
    assert held == copies_of(shares, ep, redundant) and max(held) <= ep
    slots = ",".join(str(expert) for one in ranks for expert in one)
    assert misplaced(slots, len(shares), ep, redundant) is None
    plain = max(sum(shares[rank * each : (rank + 1) * each]) for rank in range(ep)) * ep
    assert redundant or imbalance(shares, ranks) <= plain + 1e-12


def test_hot_experts_are_spread_and_copied() -> None:
    """Worked by hand: 0.4 alone fills more than a quarter; a copy of it on each of four ranks gives 0.1 to each."""
    assert imbalance(HOT, balanced_ranks(HOT, 4, 0)) == pytest.approx(4 * 0.42)
    assert copies_of(HOT, 4, 1)[:3] == [3, 2, 2]
    assert imbalance(HOT, balanced_ranks(HOT, 4, 1)) < 1.2
    assert placed_imbalance((HOT, HOT), 4, True, 1) == pytest.approx(imbalance(HOT, balanced_ranks(HOT, 4, 1)))
    assert placed_imbalance((HOT,), 4, False, 0) == pytest.approx(4 * 0.6)


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ("0,1,2", "3 places"),
        ("0,1,2,2", "3 different numbers"),
        ("0,0,1,2,3,3", "holds an expert twice"),
        ("0,0,1,2,3,1", "holds an expert twice"),
        ("2,3,1,0,0,1", "holds an expert twice"),
        ("0,1,2,0,3,1", None),
    ],
)
def test_places_that_miss_an_expert_are_named(slots: str, said: str | None) -> None:
    found = misplaced(slots, 4, 2, 1 if slots.count(",") == 5 else 0)
    assert said is None if found is None else said is not None and said in found


def test_a_plan_with_places_is_legal_without_its_loads(build: SimpleNamespace) -> None:
    """The places are in the plan: whoever checks it later needs no load profile; wrong ones are refused by rule."""
    profile, cluster = build.tiny(8, top=2), build.cluster_of("h200-2")
    layers = sum(len(kind.layer_indices) for kind in profile.layer_kinds if kind.mlp == "moe")
    loads = (HOT,) * layers
    mesh = Mesh(ep=2)
    placed = ParallelStrategy(mesh=mesh, expert_placement="balanced", redundant_experts=1)
    context = SearchContext(profile, build.recipe_of(batch=2), cluster)
    rules = {one.rule for one in violations_in(context, placed)}
    assert "placement-needs-loads" in rules
    whole = with_places(placed, loads)
    assert len(whole.expert_slots) == layers and violations_in(context, whole) == ()
    other = whole.model_copy(update={"redundant_experts": 2})
    assert "every-expert-has-a-place" in {one.rule for one in violations_in(context, other)}
    fewer = whole.model_copy(update={"expert_slots": whole.expert_slots + whole.expert_slots[:1]})
    assert "every-expert-has-a-place" in {one.rule for one in violations_in(context, fewer)}


def test_places_are_named_only_where_experts_are_placed_by_loads() -> None:
    mesh = Mesh(ep=2)
    neighbours, balanced = ParallelStrategy(mesh=mesh), ParallelStrategy(mesh=mesh, expert_placement="balanced")
    assert with_places(neighbours, (HOT,)) == neighbours and with_places(balanced, ()) == balanced
    assert with_places(balanced, (HOT,)).expert_slots == ("0,3,5,7,1,2,4,6",), "0.52 and 0.48 of the rows"
