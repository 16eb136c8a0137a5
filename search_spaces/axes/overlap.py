"""What runs while routed rows travel: the experts of another chunk of rows, or the layer's shared expert, or both.

``shared`` in more than one chunk (``overlap_chunks``) is both.
"""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, among, exchanges
from shardwright.search_spaces.context import SearchContext

VALUES = ("none", "chunked", "shared")

SHARED_FIRST = frozenset(
    {
        *("afmoe", "ernie4_5_moe", "hunyuan_v1_moe", "laguna", "minimax_m3_vl", "qwen2_moe", "qwen3_5_moe"),
        *("qwen3_next", "qwen3_omni_moe", "qwen4_exp", "step3p7", "inkling"),
    }
)
"""Families whose block calls its shared expert before the routed ones, when no row has left, or (Inkling) with more
than its tokens."""


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    if not exchanges(draws) or context.cluster.backend == "gloo":
        return ("none",)
    shape, family = context.profile.shape, context.profile.model_type.removesuffix("_text")
    return VALUES if shape.num_shared_experts and family not in SHARED_FIRST else VALUES[:2]


AXIS = Axis(
    "overlap",
    _choices,
    lambda s: s.overlap,
    among("overlap-needs-exchange", "overlap", _choices),
    encoding="categorical",
    fixed=VALUES,
    refines=True,
)
