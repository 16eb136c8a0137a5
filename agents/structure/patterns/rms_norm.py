"""RMSNorm: ``y = w · x / sqrt(mean(x²) + ε)`` over the last dimension, statistics in fp32.

Forms differ in where the result returns to the activations' format:
``cast-then-scale`` (round, then weight), ``scale-then-cast`` (weight in fp32, then round),
``unit-offset`` (weight ``1 + w`` in fp32, then round), ``rounded-offset`` (``1 + w`` in the weight's own format, then
as before), ``native`` (one call of the framework's rms_norm).
Legend: H last dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

OFFSETS = ("unit-offset", "rounded-offset")


@dataclass(frozen=True)
class Norm:
    """One RMSNorm in a canonical graph."""

    x: OpNode
    weight: OpNode
    y: OpNode
    constants: dict[str, Any]


def norms(graph: CanonicalGraph) -> tuple[Norm, ...]:
    """Every RMSNorm with a weight, in canonical order."""
    view = View(graph)
    found = [match_norm(view, node) for target in ("mul", "cast", "rms_norm") for node in view.ops(target)]
    widened = ("scale-then-cast", *OFFSETS)
    inner = {norm.y.inputs[0] for norm in found if norm and norm.constants["form"] in widened}
    kept = [norm for norm in found if norm and norm.y.id not in inner]
    return tuple(sorted(kept, key=lambda norm: graph.nodes.index(norm.y)))


def match_norm(view: View, y: OpNode) -> Norm | None:
    """The RMSNorm that ends at ``y``, or ``None``."""
    if view.is_op(y, "rms_norm"):
        return _native(view, y)
    if view.is_op(y, "cast"):
        scaled = view.operand(y)
        return _scaled(view, scaled, y, "scale-then-cast") if view.is_op(scaled, "mul", 2) else None
    return _scaled(view, y, y, "cast-then-scale") if view.is_op(y, "mul", 2) else None


def _native(view: View, y: OpNode) -> Norm | None:
    eps = y.arguments.get("eps")
    shape = y.arguments.get("normalized_shape")
    if len(y.inputs) != 2 or eps is None or not isinstance(shape, list) or len(shape) != 1:
        return None
    x, weight = view.operand(y, 0), view.operand(y, 1)
    return Norm(x, weight, y, {"eps": eps, "form": "native"}) if weight.kind == "parameter" else None


def _scaled(view: View, product: OpNode, y: OpNode, form: str) -> Norm | None:
    for body_or_cast, factor in view.both_orders(product):
        weight, offset = _weight(view, factor)
        if weight is None or weight.output is None or len(weight.output.shape) != 1:
            continue
        rounded = view.is_op(body_or_cast, "cast")
        if rounded and form == "scale-then-cast":
            continue
        body = view.operand(body_or_cast) if rounded else body_or_cast
        inner = normalised(view, body)
        if inner is None:
            continue
        x, eps = inner
        if x.output is None or y.output is None or (form == "scale-then-cast" and x.output.dtype != y.output.dtype):
            continue
        chosen = form
        if offset:
            if form != "scale-then-cast":
                continue
            chosen = offset
        constants = {"eps": eps, "form": chosen, "weight_cast": view.is_op(factor, "cast")}
        return Norm(x, weight, y, constants)
    return None


def _weight(view: View, factor: OpNode) -> tuple[OpNode | None, str]:
    """The parameter under an optional cast and an optional ``1 +``, and the form that the ``1 +`` makes."""
    offset = ""
    if _plus_one(view, factor):
        factor, offset = view.operand(factor), "unit-offset"
    elif view.is_op(factor, "cast", 1) and _plus_one(view, view.operand(factor)):
        factor, offset = view.operand(view.operand(factor)), "rounded-offset"
        return (factor if factor.kind == "parameter" else None), offset
    factor = view.through(factor, "cast")
    return (factor if factor.kind == "parameter" else None), offset


def _plus_one(view: View, node: OpNode) -> bool:
    return view.is_op(node, "add", 1) and node.arguments.get("other") == 1


def normalised(view: View, node: OpNode) -> tuple[OpNode, float] | None:
    """``x · rsqrt(mean(x²) + ε)`` → (x, ε)."""
    if not view.is_op(node, "mul", 2):
        return None
    for wide, scale in view.both_orders(node):
        if not view.is_op(scale, "rsqrt", 1):
            continue
        shifted = view.operand(scale)
        if not view.is_op(shifted, "add", 1) or "other" not in shifted.arguments:
            continue
        mean = view.operand(shifted)
        if not view.is_op(mean, "mean", 1) or mean.arguments != {"dim": [-1], "keepdim": True}:
            continue
        square = view.operand(mean)
        if not view.is_op(square, "pow", 1) or square.arguments != {"exponent": 2}:
            continue
        if view.operand(square) != wide:
            continue
        eps = shifted.arguments["other"]
        if not isinstance(eps, float):
            return None
        return (view.operand(wide) if view.is_op(wide, "cast") else wide), eps
    return None


def reference_norm(x: torch.Tensor, weight: torch.Tensor, constants: dict[str, Any]) -> torch.Tensor:
    """RMSNorm as models spell it, in any of the forms."""
    form, eps = constants["form"], constants["eps"]
    if form == "native":
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.to(torch.float32)
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form == "cast-then-scale":
        return weight * normalised.to(x.dtype)
    if form == "rounded-offset":
        return (normalised * (1.0 + weight).to(torch.float32)).to(x.dtype)
    factor = weight.to(torch.float32) if constants["weight_cast"] or form == "unit-offset" else weight
    factor = 1.0 + factor if form == "unit-offset" else factor
    return (normalised * factor).to(x.dtype)


def oracle_norm(x: torch.Tensor, weight: torch.Tensor, constants: dict[str, Any]) -> torch.Tensor:
    """RMSNorm by the Euclidean norm: ``x · sqrt(H) / sqrt(‖x‖² + H·ε)``."""
    width = x.shape[-1]
    length = torch.sqrt((x * x).sum(-1, keepdim=True) + width * constants["eps"])
    factor = 1.0 + weight if constants["form"] in OFFSETS else weight
    return x * (width**0.5) / length * factor


class RmsNorm(Pattern):
    """RMSNorm as one operator."""

    name = "rms_norm"
    version = 1
    title = "RMSNorm"
    contiguous = ("x", "weight")
    strided = ("x",)
    trainable = ("x", "weight")

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        found = [self._bind(captured, graph, norm) for norm in norms(graph)]
        return tuple(match for match in found if match is not None)

    def _bind(self, captured: CapturedGraph, graph: CanonicalGraph, norm: Norm) -> Match | None:
        anchor = norm.y.module_path
        weight = below(norm.weight.target, anchor)
        if weight is None:
            return None
        inputs = {"x": norm.x.id, "weight": norm.weight.id}
        return self.bind(captured, graph, inputs, {"y": norm.y.id}, norm.constants, anchor, {"weight": weight})

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return {"y": reference_norm(values["x"], values["weight"], constants)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return {"y": oracle_norm(values["x"], values["weight"], constants)}

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, lora_inside=False, device_types=("cuda",))
        return (
            VariantSpec("kernel", "shardwright", "rms_norm", kernel, forms=("cast-then-scale",)),
            VariantSpec("compile", "compile", "-", anywhere),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        """The kernel takes the place of a module's whole forward, so the module must do nothing else."""
        return sole_content(match) if spec.provider == "shardwright" else ""

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        return {"T": rows_per_token(match, "x") * tokens, "H": match.region.spec("x").shape[-1]}


def rows_per_token(match: Match, role: str) -> int:
    """Rows of a value for each token: 1 for hidden states, heads for a norm over a head."""
    shape = match.region.spec(role).shape
    rows = 1
    for size in shape[:-1]:
        rows *= size
    from shardwright.agents.structure.skeleton import BATCH, SEQUENCE

    return max(1, rows // (BATCH * SEQUENCE))


def sole_content(match: Match) -> str:
    """What a region's module computes besides the region; empty where the region is all."""
    inside = set(match.region.canonical_ids)
    for node in match.region.canonical.nodes:
        here = node.module_path == match.anchor or below(node.module_path, match.anchor) is not None
        if node.kind == "op" and here and node.id not in inside:
            return f"{match.anchor} also computes {node.target} at {node.source}"
    return ""
