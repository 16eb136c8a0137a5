"""Projections of one input as one product: the matrices under each other, each projection a view of its rows.

``[y₁ | y₂ | …] = x [W₁; W₂; …]ᵀ``. The merged matrix is made at load; names and shapes of the parameters stay, as
views. What a pattern adds is which projections of a module belong together.
Legend: H input width, N width of all results.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import PART_OF_MODULE, Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.rms_norm import rows_per_token
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode
from shardwright.schemas.recipe import LoraSpec

NOT_BUILT = (
    "workers keep each projection as a parameter of its own, sharded on its own rows, and build no merged matrix"
)
ADAPTED = "adapters hang on single projections, and the merged product has no place for them"
LEAST = 2


def projections(view: View, x: OpNode) -> tuple[OpNode, ...]:
    """Linears of one value by parameters, in canonical order."""
    found = (node for node in view.graph.users(x.id) if view.is_op(node, "linear") and node.inputs[0] == x.id)
    return tuple(node for node in found if all(view.graph.by_id[i].kind == "parameter" for i in node.inputs[1:]))


class MergedProjections(Pattern):
    """Two or more projections of one input in one module."""

    version = 1
    contiguous = ("x",)
    strided = ("x",)
    relayout = "the matrices become views of the rows of one"

    def bind_group(
        self, captured: CapturedGraph, graph: CanonicalGraph, anchor: str, group: Iterable[OpNode]
    ) -> Match | None:
        """A match of the projections of a group; its roles are the projections' names in the anchor."""
        view, ordered = View(graph), sorted(group, key=lambda node: node.module_path)
        if len(ordered) < LEAST or len({node.inputs[0] for node in ordered}) != 1:
            return None
        inputs, outputs, roles = {"x": ordered[0].inputs[0]}, {}, {}
        for node in ordered:
            leaves = [view.operand(node, i) for i in range(1, len(node.inputs))]
            name = (below(leaves[0].target, anchor) or "").removesuffix(".weight")
            if not name or (len(leaves) > 1 and leaves[1].target != f"{leaves[0].target.removesuffix('.weight')}.bias"):
                return None
            role = name.replace(".", "_")
            inputs[f"{role}_weight"] = leaves[0].id
            if len(leaves) > 1:
                inputs[f"{role}_bias"] = leaves[1].id
            outputs[f"{role}_y"], roles[role] = node.id, name
        constants = {"form": "rows", "projections": len(ordered)}
        return self.bind(captured, graph, inputs, outputs, constants, anchor, roles)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return {
            f"{name}_y": F.linear(values["x"], values[f"{name}_weight"], values.get(f"{name}_bias"))
            for name in _names(values)
        }

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """One product with the merged matrix, cut again."""
        names = _names(values)
        merged = torch.cat([values[f"{name}_weight"] for name in names])
        widths = [values[f"{name}_weight"].shape[0] for name in names]
        pieces = torch.split(values["x"] @ merged.t(), widths, dim=-1)
        made = {}
        for name, piece in zip(names, pieces, strict=True):
            made[f"{name}_y"] = piece + values[f"{name}_bias"] if f"{name}_bias" in values else piece
        return made

    def gradients(self, match: Match) -> tuple[str, ...]:
        return tuple(match.region.inputs)

    def inverse(self, match: Match) -> str:
        """Merge matrices of the test's sizes and read each back through its view."""
        roles = [role for role in match.region.inputs if role.endswith("_weight")]
        sizes, kept = self.sizes(match), {}
        for seed, role in enumerate(roles):
            generator = torch.Generator().manual_seed(seed)
            kept[role] = torch.randn(sizes.shape(match.region.spec(role).shape), generator=generator)
        merged, start = torch.cat([kept[role] for role in roles]), 0
        for role in roles:
            view = merged[start : start + kept[role].shape[0]]
            if not torch.equal(view, kept[role]) or not view.is_contiguous():
                raise ArithmeticError(f"the rows of {role} do not come back")
            start += kept[role].shape[0]
        return f"{len(roles)} matrices of {merged.numel()} numbers merged and read back as dense views, bit for bit"

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        merged = VariantPredicate(tp_max=1, lora_inside=False, device_types=("cuda", "cpu"))
        return (
            VariantSpec("merged", "merged", "-", merged, not_installable=NOT_BUILT),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=PART_OF_MODULE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses_adapter(self, spec: VariantSpec, lora: LoraSpec) -> str:
        return ADAPTED if spec.provider == "merged" else ""

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        widths = [match.region.spec(role).shape for role in match.region.inputs if role.endswith("_weight")]
        return {
            "T": rows_per_token(match, "x") * tokens,
            "H": widths[0][1],
            "N": sum(shape[0] for shape in widths),
            "P": len(widths),
        }


def _names(values: Tensors) -> list[str]:
    return sorted(role.removesuffix("_weight") for role in values if role.endswith("_weight"))
