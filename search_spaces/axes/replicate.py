"""Replicas: each holds a whole copy of the sharded model (HSDP)."""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, no_rule
from shardwright.search_spaces.context import SearchContext, divisors


def left(context: SearchContext, draws: Draws) -> int:
    """Ranks not yet given to pp, cp and tp."""
    return context.world // (draws.get("pp", 1) * draws.get("cp", 1) * draws.get("tp", 1))


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    return divisors(left(context, draws))


AXIS = Axis("replicate", _choices, lambda s: s.mesh.replicate, no_rule)
