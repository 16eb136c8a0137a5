"""An activation on its own: a known gate function whose operands are not an MLP's two linears.

Shown as a fact of the model (ReLU², clamped and soft-capped forms): the products around it are regions of their own or
of no known kind. Forms are those of :mod:`gates`. Legend: T rows, I width.
"""

from __future__ import annotations

from typing import Any

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import EXPERTS_SUFFIX, CapturedGraph
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View
from shardwright.agents.structure.patterns.gates import GATES, Found, find_gates
from shardwright.agents.structure.patterns.rms_norm import rows_per_token
from shardwright.agents.structure.patterns.swiglu import SwiGlu
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

NO_OPERATOR = "no operator computes this activation on its own; a fact of the model"
ENDS = ("mul", "cast", "pow", "relu")
FORMS = ("silu-clamped", "silu-clamped-after", "swiglu-sloped", "situ", "relu", "relu2")
"""Forms that are told apart from any product with a gate: by a constant, or because there is no product."""


class Activation(Pattern):
    """A gate function as one elementwise operation."""

    name = "activation"
    version = 1
    title = "Activation"
    strided = ("gate",)

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        if captured.kind.endswith(EXPERTS_SUFFIX):
            return ()
        view = View(graph)
        taken = {match.region.outputs["y"] for match in SwiGlu().find(captured, graph)}
        found: dict[str, Match] = {}
        for node in (n for n in graph.nodes if n.kind == "op" and n.target in ENDS and n.id not in taken):
            for gate in find_gates(view, node):
                match = self._bound(captured, graph, node, gate) if gate.form in FORMS else None
                if match is not None:
                    found.setdefault(node.id, match)
        squared = {
            graph.by_id[m.region.outputs["y"]].inputs[0] for m in found.values() if m.constants["gate"] == "relu2"
        }
        return tuple(match for y, match in found.items() if y not in squared)

    def _bound(self, captured: CapturedGraph, graph: CanonicalGraph, y: OpNode, gate: Found) -> Match | None:
        """Where both operands are of one size and the last dimension is the width."""
        shapes = [node.output.shape if node.output else () for node in (gate.gate, gate.up, y)]
        if len(set(shapes)) != 1 or any(node.kind == "parameter" for node in (gate.gate, gate.up)):
            return None
        inputs = {"gate": gate.gate.id} | ({"up": gate.up.id} if GATES[gate.form].gated else {})
        constants = {"form": "alone", "gate": gate.form, **gate.constants}
        return self.bind(captured, graph, inputs, {"y": y.id}, constants, y.module_path, {})

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return {"y": GATES[constants["gate"]].reference(values["gate"], values.get("up", values["gate"]), constants)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return {"y": GATES[constants["gate"]].oracle(values["gate"], values.get("up", values["gate"]), constants)}

    def gradients(self, match: Match) -> tuple[str, ...]:
        return tuple(match.region.inputs)

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=None, device_types=("cuda", "cpu"))
        compiled = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        return (
            VariantSpec("compile", "compile", "-", compiled, not_installable=NO_OPERATOR),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        spelled = [node.target for node in match.region.op_nodes]
        return {
            "T": rows_per_token(match, "y") * tokens,
            "I": match.region.spec("y").shape[-1],
            "A": len(match.region.inputs),
            "S": len(spelled),
            "wide": int("cast" in spelled),
        }
