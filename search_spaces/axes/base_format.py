"""Format of the frozen base in device memory: the recipe's, or packed as the files hold it.

The search never quantises: a packed format is legal only where the checkpoint is stored in it, and where both widths
of the experts are whole blocks of the operator that reads it packed.
"""

from __future__ import annotations

from shardwright.kernels.packed_experts.contract import WHOLE
from shardwright.search_spaces.axes.base import Axis, Draws, among
from shardwright.search_spaces.context import SearchContext

STORED = {"fp8-block": "fp8", "mxfp4": "mxfp4", "gpt-oss-mxfp4": "mxfp4", "int4-group": "int4"}


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    if context.cluster.device.type == "cpu":
        return ("compute",)
    stored = {STORED[one.format] for one in context.profile.packing if one.format in STORED}
    shape = context.profile.shape
    widths = (shape.expert_hidden_size or shape.hidden_size, shape.expert_intermediate_size)
    whole = {name for name in stored if not any(width % WHOLE.get(name, 1) for width in widths)}
    return ("compute", *sorted(whole))


AXIS = Axis("base_format", _choices, lambda s: s.base_format, among("base-format-is-stored", "base_format", _choices))
