"""Format of the frozen base in device memory: the recipe's, or packed as the files hold it.

The search never quantises: a packed format is legal only where the checkpoint is stored in it.
"""

from __future__ import annotations

from shardwright.search_spaces.axes.base import Axis, Draws, among
from shardwright.search_spaces.context import SearchContext

STORED = {"fp8-block": "fp8", "mxfp4": "mxfp4", "gpt-oss-mxfp4": "mxfp4", "int4-group": "int4"}


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    if context.cluster.device.type == "cpu":
        return ("compute",)
    packed = {STORED[one.format] for one in context.profile.packing if one.format in STORED}
    return ("compute", *sorted(packed))


AXIS = Axis("base_format", _choices, lambda s: s.base_format, among("base-format-is-stored", "base_format", _choices))
