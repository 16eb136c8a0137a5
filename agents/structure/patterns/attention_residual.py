"""Attention residuals: a sub-layer reads a softmax mix over earlier snapshots of the residual stream.

Forms: ``scored`` weighs rows by ``softmax(row · (norm × projection) / rms(row))`` and mixes the rows as they are
(arXiv 2603.15031); ``attended`` weighs normalised rows by one learned query and mixes the normalised rows.
Legend: B batch, T tokens, R rows (snapshots and the running sum), H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.interpret import Sizes
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below, holder
from shardwright.agents.structure.patterns.rms_norm import normalised
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

NO_OPERATOR = "no operator mixes rows under an attention residual's weights"


class AttentionResidual(Pattern):
    """Weights of the rows and their mix, as one operator."""

    name = "attention_residual"
    version = 1
    title = "Attention residual"
    strided = ("rows",)

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        found = [self._scored(captured, graph, view, node) for node in view.ops("softmax")]
        found += [self._attended(captured, graph, view, node) for node in view.ops("softmax")]
        return tuple(match for match in found if match is not None)

    def _scored(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, weights: OpNode) -> Match | None:
        logits = view.operand(weights)
        if weights.arguments != {"dim": [-1]} or not view.is_op(logits, "mul", 2):
            return None
        for product, scale in view.both_orders(logits):
            eps = _inverse_rms(view, scale)
            if eps is None or not view.is_op(product, "matmul", 2) or view.operand(product) != eps[0]:
                continue
            wide, leaves = eps[0], _direction(view, view.operand(product, 1))
            mixed = _mixed(view, weights, wide)
            if leaves is None or mixed is None:
                continue
            cast = view.is_op(wide, "cast", 1)
            rows = view.operand(wide) if cast else wide
            y, narrowed = mixed, False
            for user in view.graph.users(mixed.id):
                if view.is_op(user, "cast", 1) and rows.output and user.arguments == {"dtype": rows.output.dtype}:
                    y, narrowed = user, True
            nodes = {"rows": rows, "norm": leaves[0], "projection": leaves[1]}
            constants = {"form": "scored", "eps": eps[1], "cast": cast, "narrowed": narrowed}
            return self._bound(captured, graph, nodes, y, constants)
        return None

    def _attended(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, weights: OpNode) -> Match | None:
        scaled = view.operand(weights)
        scale = scaled.arguments.get("other")
        if weights.arguments != {"dim": [-1]} or not view.is_op(scaled, "mul", 1) or not isinstance(scale, float):
            return None
        product = view.operand(scaled)
        if not view.is_op(product, "matmul", 2) or not view.is_op(view.operand(product, 1), "permute", 1):
            return None
        turned, query = view.operand(product, 1), view.operand(product)
        rows_normed = view.operand(turned)
        found = normalised(view, rows_normed)
        leaf = view.through(query, "expand", "reshape", "cast")
        mixes = [n for n in view.graph.users(weights.id) if view.is_op(n, "matmul", 2)]
        if found is None or leaf.kind != "parameter" or len(mixes) != 1 or view.operand(mixes[0], 1) != rows_normed:
            return None
        if turned.arguments != {"dims": [-4, -3, -1, -2]} or leaf.output is None or len(leaf.output.shape) != 1:
            return None
        cast = any(view.is_op(wide, "cast", 1) for wide, _ in view.both_orders(rows_normed))
        constants = {"form": "attended", "eps": found[1], "scale": scale, "cast": cast}
        return self._bound(captured, graph, {"rows": found[0], "query": leaf}, mixes[0], constants)

    def _bound(
        self,
        captured: CapturedGraph,
        graph: CanonicalGraph,
        nodes: dict[str, OpNode],
        y: OpNode,
        constants: dict[str, Any],
    ) -> Match | None:
        leaves = {role: node for role, node in nodes.items() if node.kind == "parameter"}
        anchor = holder(*(node.target for node in leaves.values()))
        roles = {role: below(node.target, anchor) for role, node in leaves.items()}
        if len(leaves) != len(nodes) - 1 or None in roles.values():
            return None
        named = {role: str(name) for role, name in roles.items()}
        inputs = {role: node.id for role, node in nodes.items()}
        return self.bind(captured, graph, inputs, {"y": y.id}, constants, anchor, named)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        rows = values["rows"]
        wide = rows.to(torch.float32) if constants["cast"] else rows
        if constants["form"] == "attended":
            hidden = rows.shape[-1]
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + constants["eps"])
            query = values["query"].to(torch.float32).view(-1, hidden).expand(*rows.shape[:-2], -1, -1)
            weights = torch.softmax(torch.matmul(query, normed.transpose(-2, -1)) * constants["scale"], dim=-1)
            return {"y": torch.matmul(weights, normed)}
        scale = torch.rsqrt(wide.pow(2).mean(-1) + constants["eps"])
        direction = values["norm"].to(torch.float32) * values["projection"].to(torch.float32).reshape(-1)
        weights = torch.softmax(torch.matmul(wide, direction) * scale, dim=-1)
        mixed = (weights.unsqueeze(-1) * wide).sum(-2)
        return {"y": mixed.to(rows.dtype) if constants["narrowed"] else mixed}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """Row by row, by the exponentials themselves less the largest."""
        rows, hidden = values["rows"], values["rows"].shape[-1]
        length = torch.sqrt((rows * rows).sum(-1) + hidden * constants["eps"])
        normed = rows * (hidden**0.5) / length.unsqueeze(-1)
        if constants["form"] == "attended":
            logits = torch.einsum("...rh,h->...r", normed, values["query"].reshape(-1)) * constants["scale"]
        else:
            logits = torch.einsum("...rh,h,h->...r", normed, values["norm"], values["projection"].reshape(-1))
        grown = torch.exp(logits - logits.amax(-1, keepdim=True))
        weights = grown / grown.sum(-1, keepdim=True)
        if constants["form"] == "attended":
            return {"y": torch.einsum("...r,...rh->...h", weights, normed).unsqueeze(-2)}
        return {"y": torch.einsum("...r,...rh->...h", weights, rows)}

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Rows that differ: among equal ones the weights' gradients are nothing but rounding."""
        cases = super().cases(match, sizes)
        cases["one-hot"]["rows"] = cases["normal"]["rows"]
        return cases

    def gradients(self, match: Match) -> tuple[str, ...]:
        return tuple(match.region.inputs)

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        return (
            VariantSpec("compile", "compile", "-", anywhere, not_installable=NO_OPERATOR),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        shape = match.region.spec("rows").shape
        return {"T": tokens, "R": shape[-2], "H": shape[-1]}


def _inverse_rms(view: View, node: OpNode) -> tuple[OpNode, float] | None:
    """``rsqrt(mean(x²) + ε)`` over the last dimension → (x, ε)."""
    if not view.is_op(node, "rsqrt", 1) or not view.is_op(view.operand(node), "add", 1):
        return None
    shifted = view.operand(node)
    mean, eps = view.operand(shifted), shifted.arguments.get("other")
    if not view.is_op(mean, "mean", 1) or mean.arguments != {"dim": [-1]} or not isinstance(eps, float):
        return None
    square = view.operand(mean)
    if not view.is_op(square, "pow", 1) or square.arguments != {"exponent": 2}:
        return None
    return view.operand(square), eps


def _direction(view: View, node: OpNode) -> tuple[OpNode, OpNode] | None:
    """``norm × projection`` → (norm ``[H]``, projection ``[1, H]``)."""
    if not view.is_op(node, "mul", 2):
        return None
    for norm, projection in view.both_orders(node):
        one, other = view.through(norm, "cast"), view.through(projection, "cast", "reshape")
        if one.kind != "parameter" or other.kind != "parameter" or not one.output or not other.output:
            continue
        if len(one.output.shape) == 1 and other.output.shape == (1, *one.output.shape):
            return one, other
    return None


def _mixed(view: View, weights: OpNode, wide: OpNode) -> OpNode | None:
    """``Σ_r w_r · row_r``."""
    for column in view.graph.users(weights.id):
        if not view.is_op(column, "reshape", 1):
            continue
        for product in view.graph.users(column.id):
            if not view.is_op(product, "mul", 2) or wide.id not in product.inputs:
                continue
            sums = [n for n in view.graph.users(product.id) if view.is_op(n, "sum", 1)]
            if len(sums) == 1 and sums[0].arguments == {"dim": [-2]}:
                return sums[0]
    return None
