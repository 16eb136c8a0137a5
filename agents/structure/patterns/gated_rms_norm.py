"""Gated RMSNorm of linear attention: ``y = w · x / sqrt(mean(x²) + ε) · act(gate)``, statistics and gate in fp32.

Forms: ``wide`` scales by the weight in fp32; ``rounded`` returns to the activations' format before the weight.
The gate's activation is the constant ``act``: ``silu`` or ``sigmoid``. Legend: H last dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.rms_norm import normalised
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

ACTIVATIONS = ("silu", "sigmoid")


class GatedRmsNorm(Pattern):
    """Norm, weight and gate as one operator."""

    name = "gated_rms_norm"
    version = 1
    title = "Gated RMSNorm"
    contiguous = ("weight",)
    strided = ("x", "gate")
    trainable = ("x", "weight", "gate")
    costed = False

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        found = [self._at(captured, graph, view, node) for node in view.ops("cast")]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, y: OpNode) -> Match | None:
        product = view.operand(y)
        if not view.is_op(product, "mul", 2):
            return None
        for scaled, opened in view.both_orders(product):
            if not view.is_op(opened, opened.target, 1) or opened.target not in ACTIVATIONS:
                continue
            wide = view.operand(opened)
            if not view.is_op(wide, "cast", 1) or not view.is_op(scaled, "mul", 2):
                continue
            for factor, body in view.both_orders(scaled):
                weight = view.through(factor, "cast")
                rounded = view.is_op(body, "cast", 1)
                inner = normalised(view, view.operand(body) if rounded else body)
                if inner is None or weight.kind != "parameter" or rounded == view.is_op(factor, "cast"):
                    continue
                constants = {"eps": inner[1], "form": "rounded" if rounded else "wide", "act": opened.target}
                return self._bound(
                    captured, graph, {"x": inner[0], "weight": weight, "gate": view.operand(wide)}, y, constants
                )
        return None

    def _bound(
        self,
        captured: CapturedGraph,
        graph: CanonicalGraph,
        nodes: dict[str, OpNode],
        y: OpNode,
        constants: dict[str, Any],
    ) -> Match | None:
        name = below(nodes["weight"].target, y.module_path)
        if name is None:
            return None
        inputs = {role: node.id for role, node in nodes.items()}
        return self.bind(captured, graph, inputs, {"y": y.id}, constants, y.module_path, {"weight": name})

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        x, weight = values["x"], values["weight"]
        wide = x.to(torch.float32)
        body = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + constants["eps"])
        scaled = weight * body.to(x.dtype) if constants["form"] == "rounded" else weight.to(torch.float32) * body
        act = F.silu if constants["act"] == "silu" else torch.sigmoid
        return {"y": (scaled * act(values["gate"].to(torch.float32))).to(x.dtype)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        x, gate = values["x"], values["gate"]
        length = torch.sqrt((x * x).sum(-1, keepdim=True) + x.shape[-1] * constants["eps"])
        opened = (1 + torch.tanh(gate / 2)) / 2
        opened = gate * opened if constants["act"] == "silu" else opened
        return {"y": x * x.shape[-1] ** 0.5 / length * values["weight"] * opened}

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        return (VariantSpec("eager", "eager", "-", anywhere),)

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        return {"T": tokens, "H": match.region.spec("x").shape[-1]}
