"""Gated RMSNorm of linear attention: ``y = w · x / sqrt(mean(x²) + ε) · act(gate)``, statistics and gate in fp32.

Forms: ``wide`` scales by the weight in fp32; ``rounded`` returns to the activations' format before the weight.
The gate's activation is the constant ``act``: ``silu`` or ``sigmoid``. Legend: H last dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.rms_norm import normalised, rows_per_token, sole_content
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

ACTIVATIONS = ("silu", "sigmoid")
TWO = 2


class GatedRmsNorm(Pattern):
    """Norm, weight and gate as one operator."""

    name = "gated_rms_norm"
    version = 1
    title = "Gated RMSNorm"
    contiguous = ("weight",)
    strided = ("x", "gate")
    trainable = ("x", "weight", "gate")

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
        kernel = VariantPredicate(tp_max=1, lora_inside=False, device_types=("cuda",))
        return (
            VariantSpec("kernel", "shardwright", "gated_rms_norm", kernel),
            VariantSpec("compile", "compile", "-", anywhere),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        """A module's whole forward is exchanged: it must do nothing else, and the operator's takes (values, gate)."""
        if spec.provider == "eager":
            return ""
        refused = sole_content(match)
        return refused or (_called_otherwise(match) if spec.provider == "shardwright" else "")

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        from shardwright.kernels.gated_rms_norm.reference import gated_rms_norm_reference

        def run(values: Tensors) -> Tensors:
            x, gate, weight = (values[role] for role in ("x", "gate", "weight"))
            return {"y": gated_rms_norm_reference(x, gate, weight, match.constants["eps"], match.constants["act"])}

        return run

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        from shardwright.kernels.gated_rms_norm import contract

        shapes = (match.region.spec(role).shape for role in ("x", "gate", "weight"))
        x, gate, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        contract.check_static(x, gate, weight, match.constants["eps"], match.constants["act"])
        return True

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        return {"T": tokens, "H": rows_per_token(match, "x"), "D": match.region.spec("x").shape[-1]}


def _called_otherwise(match: Match) -> str:
    """Why the module's forward is not (hidden states, gate); empty where it is."""
    inner = match.anchor.removeprefix(match.captured.module_path).removeprefix(".")
    forward = inspect.signature(type(match.captured.module.get_submodule(inner)).forward)
    given = [name for name, one in forward.parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD][1:]
    gated = len(given) == TWO and "gate" in given[1]
    return "" if gated else f"{match.anchor} takes {', '.join(given)}, not hidden states and a gate"
