"""Which EP rank owns which expert: runs of neighbours, or evened out by measured loads."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation, among, exchanges
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.placement import misplaced

VALUES = ("contiguous", "balanced")


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    """``balanced`` needs a load profile, or a plan that says already where experts live."""
    placed = context.loads or draws.get("expert_slots")
    return VALUES if exchanges(draws) and placed else ("contiguous",)


_AMONG = among("placement-needs-loads", "expert_placement", _choices)


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    """The value goes with the mesh, and the places that a plan names hold every expert of every MoE layer."""
    found: list[Violation] = list(_AMONG(context, strategy))
    slots = strategy.expert_slots
    layers = sum(len(kind.layer_indices) for kind in context.profile.layer_kinds if kind.mlp == "moe")
    wrong = f"places for {len(slots)} layers, the model has {layers} with experts" if slots else None
    if slots and len(slots) == layers:
        told = (misplaced(one, context.experts, strategy.mesh.ep, strategy.redundant_experts) for one in slots)
        wrong = next((what for what in told if what is not None), None)
    if wrong is not None:
        nearest = ("expert_placement contiguous",)
        found.append(Violation(rule="every-expert-has-a-place", message=wrong, nearest_legal=nearest))
    return tuple(found)


AXIS = Axis(
    "expert_placement",
    _choices,
    lambda s: s.expert_placement,
    _check,
    encoding="categorical",
    fixed=VALUES,
    refines=True,
)
