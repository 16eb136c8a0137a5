"""An adapter beside a frozen product: ``y = x Wᵀ [+ b] + s · (x Aᵀ) Bᵀ``, plain or by groups of rows.

Models are captured before workers add adapters; this region is seen in a checkpoint whose own code has them, and in a
model that PEFT has wrapped. Forms: ``linear``, and ``grouped`` where every expert has its own W, A, B.
Legend: T rows, H input width, N output width, r rank, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import float_cases
from shardwright.agents.structure.interpret import Sizes, grouped_product
from shardwright.agents.structure.patterns.base import (
    PART_OF_MODULE,
    Match,
    Pattern,
    Tensors,
    VariantSpec,
    View,
    below,
    holder,
)
from shardwright.agents.structure.patterns.rms_norm import rows_per_token
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

PRODUCTS = {"linear": "linear", "_grouped_mm": "grouped"}
NOT_ALONE = (
    "workers give adapters of experts to the grouped experts operator as a whole, and add those of linears apart"
)
STACK_RANK = 3


class LoraLinear(Pattern):
    """Base product, adapter and their sum."""

    name = "lora_linear"
    version = 1
    title = "Adapter beside a frozen product"
    strided = ("x",)
    lora = "the region is an adapter with its base, and every variant computes both"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view, found = View(graph), []
        for total in view.ops("add"):
            for base, branch in view.both_orders(total):
                match = self._at(captured, graph, view, total, base, branch)
                if match is not None:
                    found.append(match)
        return tuple(found)

    def _at(
        self, captured: CapturedGraph, graph: CanonicalGraph, view: View, total: OpNode, base: OpNode, branch: OpNode
    ) -> Match | None:
        scaled = view.is_op(branch, "mul", 1)
        second = view.operand(branch) if scaled else branch
        if base.target not in PRODUCTS or second.target != base.target or not base.inputs or not second.inputs:
            return None
        first = view.operand(second)
        if first.target != base.target or len(first.inputs) != len(second.inputs):
            return None
        given, x = view.operand(first), view.operand(base)
        dropped = view.is_op(given, "dropout", 1)
        if (view.operand(given) if dropped else given) != x:
            return None
        form = PRODUCTS[base.target]
        made = self._linear(view, base, first, second) if form == "linear" else self._grouped(view, base, first, second)
        if made is None:
            return None
        nodes, turned = {"x": x, **made[0]}, made[1]
        scale = branch.arguments.get("other") if scaled else 1.0
        if not isinstance(scale, (int, float)):
            return None
        leaves = {role: node for role, node in nodes.items() if node.kind == "parameter"}
        anchor = holder(*(node.target for node in leaves.values()))
        names = {role: below(node.target, anchor) for role, node in leaves.items()}
        if not {"base", "a", "b"} <= set(leaves) or None in names.values():
            return None
        constants = {"form": form, "scale": float(scale), "scaled": scaled, "turned": turned}
        chance = given.arguments.get("p", 0.0) if dropped else 0.0
        constants["dropout"] = float(chance) if isinstance(chance, (int, float)) else 1.0
        roles = {role: str(name) for role, name in names.items()}
        inputs = {role: node.id for role, node in nodes.items()}
        return self.bind(captured, graph, inputs, {"y": total.id}, constants, anchor, roles)

    @staticmethod
    def _linear(view: View, base: OpNode, first: OpNode, second: OpNode) -> tuple[dict[str, OpNode], bool] | None:
        nodes = {"base": view.operand(base, 1), "a": view.operand(first, 1), "b": view.operand(second, 1)}
        if len(first.inputs) != 2 or len(base.inputs) > STACK_RANK:
            return None
        if len(base.inputs) == STACK_RANK:
            nodes["bias"] = view.operand(base, 2)
        a, b = nodes["a"].output, nodes["b"].output
        narrow = a is not None and b is not None and a.shape[0] == b.shape[1] < min(a.shape[1], b.shape[0])
        return (nodes, False) if narrow else None

    @staticmethod
    def _grouped(view: View, base: OpNode, first: OpNode, second: OpNode) -> tuple[dict[str, OpNode], bool] | None:
        """Stacks ``[E, out, in]`` turned for the product, or ``[E, in, out]``."""
        products = (base, first, second)
        if any(len(node.inputs) != STACK_RANK for node in products) or len({node.inputs[2] for node in products}) != 1:
            return None
        stacks = [view.operand(node, 1) for node in products]
        turned = [view.is_op(stack, "permute", 1) and stack.arguments == {"dims": [-3, -1, -2]} for stack in stacks]
        if len(set(turned)) != 1:
            return None
        leaves = [view.operand(stack) if turned[0] else stack for stack in stacks]
        names = dict(zip(("base", "a", "b"), leaves, strict=True))
        return {**names, "offs": view.operand(base, 2)}, turned[0]

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        x = values["x"]
        given = F.dropout(x, constants["dropout"]) if constants["dropout"] else x
        if constants["form"] == "linear":
            branch = F.linear(F.linear(given, values["a"]), values["b"])
            base = F.linear(x, values["base"], values.get("bias"))
        else:
            stacks = {r: values[r].transpose(-2, -1) if constants["turned"] else values[r] for r in ("base", "a", "b")}
            product = grouped_product if x.dtype == torch.float64 else torch._grouped_mm
            base = product(x, stacks["base"], offs=values["offs"])
            branch = product(product(given, stacks["a"], offs=values["offs"]), stacks["b"], offs=values["offs"])
        return {"y": base + (branch * constants["scale"] if constants["scaled"] else branch)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """One product with the merged matrix ``W + s B A``."""
        if constants["form"] == "linear":
            merged = values["base"] + constants["scale"] * values["b"] @ values["a"]
            y = torch.einsum("...h,nh->...n", values["x"], merged)
            return {"y": y + values["bias"] if "bias" in values else y}
        base, a, b = (values[r].transpose(-2, -1) if constants["turned"] else values[r] for r in ("base", "a", "b"))
        merged = base + constants["scale"] * torch.einsum("ehr,ern->ehn", a, b)
        expert = torch.searchsorted(values["offs"], torch.arange(values["x"].shape[0], dtype=torch.int32), right=True)
        kept = expert < merged.shape[0]
        y = torch.einsum("th,thn->tn", values["x"], merged[expert.clamp(max=merged.shape[0] - 1)])
        return {"y": y * kept.unsqueeze(-1)}

    def gradients(self, match: Match) -> tuple[str, ...]:
        return tuple(role for role in match.region.inputs if role != "offs")

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """By groups also: an empty group, one that holds all rows, rows after the last group."""
        shapes = {r: sizes.shape(match.region.spec(r).shape) for r in match.region.inputs if r != "offs"}
        cases = float_cases(shapes, seed=43, strided=self.strided)
        if "offs" not in match.region.inputs:
            return cases
        groups, rows = sizes.shape(match.region.spec("offs").shape)[0], shapes["x"][0]
        for at, case in enumerate(cases.values()):
            case["offs"] = _ends(groups, rows, at)
        hot, short = dict(cases["normal"]), dict(cases["normal"])
        hot["offs"] = torch.full((groups,), rows, dtype=torch.int32)
        hot["offs"][0] = 0
        short["offs"] = torch.clamp(short["offs"], max=rows - 1)
        return {**cases, "one-hot-group": hot, "rows-beyond": short}

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, lora_inside=True, device_types=("cuda",))
        return (
            VariantSpec(
                "kernel", "shardwright", "grouped_lora_mlp", kernel, forms=("grouped",), not_installable=NOT_ALONE
            ),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=PART_OF_MODULE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def unranked(self, match: Match, spec: VariantSpec) -> str:
        return "the operator takes an experts block as a whole" if spec.provider == "shardwright" else ""

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        a, b = match.region.spec("a").shape, match.region.spec("b").shape
        if match.constants["form"] == "linear":
            return {"T": rows_per_token(match, "x") * tokens, "H": a[1], "N": b[0], "r": a[0]}
        turned = match.constants["turned"]
        hidden, rank, out = (a[2], a[1], b[1]) if turned else (a[1], a[2], b[2])
        return {"T": rows_per_token(match, "x") * tokens, "E": a[0], "H": hidden, "N": out, "r": rank}


def _ends(groups: int, rows: int, seed: int) -> Tensor:
    """Where groups of random sizes end; the second is empty, and all rows belong to some group."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, rows + 1, (groups,), generator=generator).sort().values.to(torch.int32)
    if groups > 1:
        ends[1] = ends[0]
    ends[-1] = rows
    return ends
