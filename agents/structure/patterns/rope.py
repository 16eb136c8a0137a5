"""Rotary position embedding of one tensor, with the cosines and sines of its positions.

Forms: ``half-split`` rotates dimension j with j + D/2 (``x·cos + [−x₂, x₁]·sin``); ``interleaved`` rotates neighbours
and puts the results in halves. ``partial`` says that only a part of the head's width is rotated; the rest lies outside.
Legend: D rotated width of a head.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode


class Rope(Pattern):
    """Rotation of queries or keys."""

    name = "rope"
    version = 1
    title = "Rotary embedding"
    strided = ("x",)
    trainable = ("x",)
    costed = False

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        found = [self._half_split(captured, graph, view, node) for node in view.ops("add")]
        found += [self._interleaved(captured, graph, view, node) for node in view.ops("cat")]
        return tuple(match for match in found if match is not None)

    def _half_split(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, y: OpNode) -> Match | None:
        for kept, turned in view.both_orders(y):
            if not view.is_op(kept, "mul", 2) or not view.is_op(turned, "mul", 2):
                continue
            for rotated, sin in view.both_orders(turned):
                x = self._rotated(view, rotated)
                if x is None:
                    continue
                for same, cos in view.both_orders(kept):
                    if same == x:
                        return self._bound(captured, graph, view, x, cos, sin, y, "half-split")
        return None

    @staticmethod
    def _rotated(view: View, node: OpNode) -> OpNode | None:
        """``[−x₂, x₁]`` → x."""
        if not view.is_op(node, "cat", 2) or node.arguments.get("dim") != -1:
            return None
        negated, first = view.operand(node, 0), view.operand(node, 1)
        if not view.is_op(negated, "neg", 1):
            return None
        second = view.operand(negated)
        halves = _halves(view, first, second)
        return halves[0] if halves is not None and halves[1] == "halves" else None

    def _interleaved(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, y: OpNode) -> Match | None:
        """``[a·cos − b·sin, b·cos + a·sin]`` with a, b the even and odd values of x."""
        if not view.is_op(y, "cat", 2) or y.arguments.get("dim") != -1:
            return None
        low, high = view.operand(y, 0), view.operand(y, 1)
        if not view.is_op(low, "sub", 2) or not view.is_op(high, "add", 2):
            return None
        left, right = view.operand(low, 0), view.operand(low, 1)
        if not view.is_op(left, "mul", 2) or not view.is_op(right, "mul", 2):
            return None
        for a, cos in view.both_orders(left):
            for b, sin in view.both_orders(right):
                halves = _halves(view, a, b)
                if halves is not None and halves[1] == "columns":
                    return self._bound(captured, graph, view, halves[0], cos, sin, y, "interleaved")
        return None

    def _bound(
        self,
        captured: CapturedGraph,
        graph: CanonicalGraph,
        view: View,
        x: OpNode,
        cos: OpNode,
        sin: OpNode,
        y: OpNode,
        form: str,
    ) -> Match | None:
        if cos.output is None or sin.output is None or cos.output.shape != sin.output.shape:
            return None
        constants = {"form": form, "partial": view.is_op(x, "slice", 1)}
        inputs = {"x": x.id, "cos": cos.id, "sin": sin.id}
        return self.bind(captured, graph, inputs, {"y": y.id}, constants, y.module_path, {})

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        x, cos, sin = values["x"], values["cos"], values["sin"]
        if constants["form"] == "interleaved":
            a, b = x[..., 0::2], x[..., 1::2]
            return {"y": torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)}
        half = x.shape[-1] // 2
        return {"y": (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """Each pair as one complex number, rotated by ``cos + i·sin`` of its own place."""
        x, cos, sin = values["x"], values["cos"], values["sin"]
        half = x.shape[-1] // 2
        if constants["form"] == "interleaved":
            turned = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.complex(cos, sin)
            return {"y": torch.cat((turned.real, turned.imag), dim=-1)}
        pair = torch.complex(x[..., :half], x[..., half:])
        low = (pair * torch.complex(cos[..., :half], sin[..., :half])).real
        high = (pair * torch.complex(cos[..., half:], sin[..., half:])).imag
        return {"y": torch.cat((low, high), dim=-1)}

    def variants(self) -> tuple[VariantSpec, ...]:
        return (VariantSpec("eager", "eager", "-", VariantPredicate(tp_max=None, device_types=("cuda", "cpu"))),)

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        return {"T": tokens, "D": match.region.spec("x").shape[-1]}


def _halves(view: View, first: OpNode, second: OpNode) -> tuple[OpNode, str] | None:
    """(x, how it is cut) where two slices are the two halves or the even and odd columns of one value."""
    if not view.is_op(first, "slice", 1) or not view.is_op(second, "slice", 1) or first.inputs != second.inputs:
        return None
    x = view.operand(first)
    if x.output is None:
        return None
    width = x.output.shape[-1]
    pieces = [first.arguments, second.arguments]
    if pieces == [{"dim": -1, "start": s, "stop": s + width // 2} for s in (0, width // 2)]:
        return x, "halves"
    if pieces == [{"dim": -1, "start": s, "stop": width, "step": 2} for s in (0, 1)]:
        return x, "columns"
    return None
