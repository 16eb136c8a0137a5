"""Activation checkpointing: keep everything, keep each layer's input and recompute the rest, or some layers."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces import executable
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.context import SearchContext

VALUES = ("none", "full", "layers")


def routing_is_kept(context: SearchContext) -> bool:
    """Whether a recomputed MoE layer is proved to route every token as its forward pass did."""
    return context.experts == 0 or executable.PRESERVED_ROUTING is not None


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    if not routing_is_kept(context):
        return ("none",)
    return VALUES if context.profile.shape.num_layers > 1 else VALUES[:2]


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    if strategy.checkpointing == "none" or routing_is_kept(context):
        return ()
    return (
        Violation(
            rule="recompute-keeps-routing",
            message="the recomputed router may choose other experts than the forward pass: its outputs must be saved",
            nearest_legal=("checkpointing none",),
        ),
    )


AXIS = Axis("checkpointing", _choices, lambda s: s.checkpointing, _check, encoding="categorical", fixed=VALUES)
