"""FSDP degree of expert weights; the rest of the model is sharded over shard × ep.

Every degree is legal: a stack with fewer experts than shard ranks is split on another dim, or padded.
"""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, no_rule
from shardwright.search_spaces.axes.replicate import left
from shardwright.search_spaces.context import SearchContext


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    return (left(context, draws) // (draws["replicate"] * draws["ep"]),)


AXIS = Axis("shard", _choices, lambda s: s.mesh.shard, no_rule)
