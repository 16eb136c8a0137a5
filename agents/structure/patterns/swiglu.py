"""Gate activation and product: ``g(gate) · u(up)``; SwiGLU, GeGLU, SiTU, clamped and sloped forms.

Forms: ``split`` (gate and up are two linears of one input) and ``merged`` (two halves of one projection, gate first).
The gate's own form is the constant ``gate``. Legend: H hidden, I width of the gate.
"""

from __future__ import annotations

from typing import Any

from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below, holder
from shardwright.agents.structure.patterns.gates import GATES, Found, find_gates
from shardwright.agents.structure.patterns.rms_norm import rows_per_token
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode


class SwiGlu(Pattern):
    """Gate activation and product as one operator."""

    name = "swiglu"
    version = 2
    title = "Gated activation"
    strided = ("x",)
    trainable = ("x",)
    lora = "adapters wrap the linears, which stay modules of their own, and run inside whichever variant is taken"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        ops = [node for node in graph.nodes if node.kind == "op" and node.target in ("mul", "cast")]
        found: dict[str, Match] = {}
        for node in ops:
            for gate in find_gates(view, node):
                match = self._at(captured, graph, view, node, gate) if GATES[gate.form].gated else None
                if match is not None:
                    found.setdefault(node.id, match)
        return tuple(found.values())

    def _at(
        self, captured: CapturedGraph, graph: CanonicalGraph, view: View, product: OpNode, found: Found
    ) -> Match | None:
        constants = {"gate": found.form, **found.constants}
        if view.is_op(found.gate, "linear", 2) and view.is_op(found.up, "linear", 2):
            return self._split(captured, graph, view, product, found, constants)
        if view.is_op(found.gate, "slice", 1) and view.is_op(found.up, "slice", 1):
            return self._merged(captured, graph, view, product, found, constants)
        return None

    def _split(
        self,
        captured: CapturedGraph,
        graph: CanonicalGraph,
        view: View,
        product: OpNode,
        found: Found,
        constants: dict[str, Any],
    ) -> Match | None:
        x = view.operand(found.gate)
        weights = view.operand(found.gate, 1), view.operand(found.up, 1)
        if view.operand(found.up) != x or any(w.kind != "parameter" for w in weights):
            return None
        anchor = product.module_path
        names = [below(w.target, anchor) for w in weights]
        if None in names:
            anchor = holder(weights[0].target, weights[1].target)
            names = [below(w.target, anchor) for w in weights]
        if None in names:
            return None
        inputs = {"x": x.id, "gate": weights[0].id, "up": weights[1].id}
        roles = {"gate": str(names[0]).removesuffix(".weight"), "up": str(names[1]).removesuffix(".weight")}
        return self.bind(captured, graph, inputs, {"y": product.id}, {"form": "split", **constants}, anchor, roles)

    def _merged(
        self,
        captured: CapturedGraph,
        graph: CanonicalGraph,
        view: View,
        product: OpNode,
        found: Found,
        constants: dict[str, Any],
    ) -> Match | None:
        x = view.operand(found.gate)
        if view.operand(found.up) != x or x.output is None:
            return None
        width = x.output.shape[-1] // 2
        wanted = [{"dim": -1, "start": s, "stop": s + width} for s in (0, width)]
        if [found.gate.arguments, found.up.arguments] != wanted or 2 * width != x.output.shape[-1]:
            return None
        inputs = {"x": x.id}
        anchor = product.module_path
        return self.bind(captured, graph, inputs, {"y": product.id}, {"form": "merged", **constants}, anchor, {})

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        if constants["form"] == "split":
            gate, up = F.linear(values["x"], values["gate"]), F.linear(values["x"], values["up"])
        else:
            gate, up = values["x"].chunk(2, dim=-1)
        return {"y": GATES[constants["gate"]].reference(gate, up, constants)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        x = values["x"]
        if constants["form"] == "split":
            gate, up = x @ values["gate"].T, x @ values["up"].T
        else:
            width = x.shape[-1] // 2
            gate, up = x[..., :width], x[..., width:]
        return {"y": GATES[constants["gate"]].oracle(gate, up, constants)}

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        return (
            VariantSpec("compile", "compile", "-", anywhere, forms=("split",)),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        """Workers compile the module that computes the gate; a gate that is a module of its own has no projections."""
        if spec.provider == "compile" and match.region.op_nodes[-1].module_path != match.anchor:
            return "the activation is a module of its own, inside the one that holds the projections"
        return ""

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        rows = rows_per_token(match, "y") * tokens
        return {"T": rows, "I": match.region.spec("y").shape[-1]}
