"""The module around a linear-attention layer: projections only, so that workers may run them one by one.

Each value that the region takes is a projection of the layer's input, or the second of two in a row, or a range of
every head's part of a projection (queries, keys, values and gate out of one). The result goes into one projection,
which gives what the module returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.agents.structure.capture import CAPTURE_ERRORS, CapturedGraph
from shardwright.agents.structure.patterns.base import View, below
from shardwright.agents.structure.patterns.delta_rule_reading import Layer
from shardwright.schemas.graph import OpNode

LOW = "_low"
"""Behind a role: the first of two projections in a row."""
SAMPLE = (1, 2)
"""Rows and tokens of a call that shows what the module returns."""


@dataclass
class Around:
    """Parts by role, ranges of projections, and the first thing that is not plain."""

    roles: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, int] = field(default_factory=dict)
    """``{role}_groups``, ``{role}_start``, ``{role}_stop``: where the role is a range of each group's values."""
    because: str = ""

    def fault(self, what: str) -> None:
        self.because = self.because or what


def around(view: View, captured: CapturedGraph, layer: Layer, anchor: str) -> Around:
    """Parts of the module at ``anchor`` by role, relative to it; ``because`` says where it computes more."""
    found = Around()
    ends = set()
    for role, node in layer.inputs.items():
        if node.kind != "parameter":
            end = _source(view, found, role, node, anchor)
            ends.add("" if end is None else end.id)
        elif (name := below(node.target, anchor)) is None:
            found.fault(f"{role} lies outside {anchor}")
        else:
            found.roles[role] = name
    if len(ends) != 1:
        found.fault("projections read different values")
    elif (end_id := next(iter(ends))) and view.graph.by_id[end_id].module_path == anchor:
        found.fault("the layer changes its input before it projects it")
    _result(view, found, layer.y, anchor)
    if not found.because:
        found.because = _otherwise(captured, anchor, found.roles["o"])
    return found


def _source(view: View, found: Around, role: str, node: OpNode, anchor: str) -> OpNode | None:
    """Name the projections that make a value; what they read."""
    if node.target in ("reshape", "slice"):
        node = _range(view, found, role, node)
    if node.target != "linear":
        found.fault(f"{role} is not a projection's result")
        return None
    _name(found, role, node, anchor)
    under = view.operand(node)
    if under.target == "linear" and below(under.module_path, anchor):
        _name(found, role + LOW, under, anchor)
        under = view.operand(under)
    return under


def _range(view: View, found: Around, role: str, node: OpNode) -> OpNode:
    """``projection.view(B, T, groups, -1)[..., start:stop]``, joined again, also of one group; the projection."""
    cut = view.through(node, "reshape")
    start, stop = cut.arguments.get("start"), cut.arguments.get("stop")
    if cut.target != "slice" or cut.arguments.get("dim") != -1 or "step" in cut.arguments:
        return cut
    grouped = view.operand(cut)
    source = view.operand(grouped) if grouped.target == "reshape" else grouped
    if source.target != "linear" or source.output is None or grouped.output is None:
        return source
    lead, shape = source.output.shape[:-1], grouped.output.shape[:-1]
    if shape[: len(lead)] != lead or not isinstance(start, int) or not isinstance(stop, int):
        return cut
    count = math.prod(shape[len(lead) :])
    found.ranges |= {f"{role}_groups": count, f"{role}_start": start, f"{role}_stop": stop}
    return source


def _name(found: Around, role: str, node: OpNode, anchor: str) -> None:
    path = below(node.module_path, anchor)
    found.roles[role] = path or ""
    if not path:
        found.fault(f"{role} is no part of its own at {node.source}")


def _result(view: View, found: Around, y: OpNode, anchor: str) -> None:
    """The one projection that reads the region's result, and whose own the module returns as it is."""
    readers = view.graph.users(y.id)
    if len(readers) != 1 or readers[0].target != "linear" or view.operand(readers[0]) != y:
        found.fault("the result goes elsewhere than into one projection")
        return
    _name(found, "o", readers[0], anchor)
    for user in view.graph.users(readers[0].id):
        if user.module_path == anchor:
            found.fault(f"{anchor} computes {user.target} behind its last projection")


def _otherwise(captured: CapturedGraph, anchor: str, last: str) -> str:
    """Why a worker may not call the module with hidden states alone for one tensor; empty where it may."""
    inner = anchor.removeprefix(captured.module_path).removeprefix(".")
    module: Any = captured.module.get_submodule(inner)
    weight = module.get_submodule(last).weight
    hidden = torch.empty(*SAMPLE, weight.shape[0], dtype=weight.dtype, device=weight.device)
    try:
        with torch.no_grad():
            seen = module(hidden)
    except CAPTURE_ERRORS as error:
        return f"{anchor} cannot be called with hidden states alone: {type(error).__name__}"
    plain = isinstance(seen, torch.Tensor) and seen.shape == hidden.shape
    return "" if plain else f"{anchor} returns {type(seen).__name__}, not hidden states"
