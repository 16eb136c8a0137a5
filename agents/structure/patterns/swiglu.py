"""SwiGLU: ``silu(gate) · up``.

Forms: ``split`` (gate and up are two linears of one input) and ``merged`` (two halves of one projection, gate first).
Legend: H hidden, I width of the gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.rms_norm import rows_per_token
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode


class SwiGlu(Pattern):
    """Gate activation and product as one operator."""

    name = "swiglu"
    version = 1
    title = "SwiGLU"
    strided = ("x",)
    trainable = ("x",)
    lora = "adapters wrap the linears, which stay modules of their own, and run inside whichever variant is taken"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        found = [self._at(captured, graph, view, node) for node in view.ops("mul")]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, product: OpNode) -> Match | None:
        for activated, up in view.both_orders(product):
            if not view.is_op(activated, "silu", 1):
                continue
            gate = view.operand(activated)
            if view.is_op(gate, "linear", 2) and view.is_op(up, "linear", 2):
                return self._split(captured, graph, view, product, gate, up)
            if view.is_op(gate, "slice", 1) and view.is_op(up, "slice", 1):
                return self._merged(captured, graph, view, product, gate, up)
        return None

    def _split(
        self, captured: CapturedGraph, graph: CanonicalGraph, view: View, product: OpNode, gate: OpNode, up: OpNode
    ) -> Match | None:
        x = view.operand(gate)
        weights = view.operand(gate, 1), view.operand(up, 1)
        if view.operand(up) != x or any(w.kind != "parameter" for w in weights):
            return None
        anchor = product.module_path
        names = [below(w.target, anchor) for w in weights]
        if None in names:
            return None
        inputs = {"x": x.id, "gate": weights[0].id, "up": weights[1].id}
        roles = {"gate": str(names[0]).removesuffix(".weight"), "up": str(names[1]).removesuffix(".weight")}
        return self.bind(captured, graph, inputs, {"y": product.id}, {"form": "split"}, anchor, roles)

    def _merged(
        self, captured: CapturedGraph, graph: CanonicalGraph, view: View, product: OpNode, gate: OpNode, up: OpNode
    ) -> Match | None:
        x = view.operand(gate)
        if view.operand(up) != x or x.output is None:
            return None
        width = x.output.shape[-1] // 2
        wanted = [{"dim": -1, "start": s, "stop": s + width} for s in (0, width)]
        if [gate.arguments, up.arguments] != wanted or 2 * width != x.output.shape[-1]:
            return None
        inputs = {"x": x.id}
        return self.bind(captured, graph, inputs, {"y": product.id}, {"form": "merged"}, product.module_path, {})

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        if constants["form"] == "split":
            gate, up = F.linear(values["x"], values["gate"]), F.linear(values["x"], values["up"])
        else:
            gate, up = values["x"].chunk(2, dim=-1)
        return {"y": F.silu(gate) * up}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        x = values["x"]
        if constants["form"] == "split":
            gate, up = x @ values["gate"].T, x @ values["up"].T
        else:
            width = x.shape[-1] // 2
            gate, up = x[..., :width], x[..., width:]
        return {"y": up * gate * (1 + torch.tanh(gate / 2)) / 2}

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        return (
            VariantSpec("compile", "compile", "-", anywhere, forms=("split",)),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        rows = rows_per_token(match, "y") * tokens
        return {"T": rows, "I": match.region.spec("y").shape[-1]}
