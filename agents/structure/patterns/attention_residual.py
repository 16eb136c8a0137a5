"""Attention residuals: a sub-layer reads a softmax mix over earlier snapshots of the residual stream.

Forms: ``scored`` weighs rows by ``softmax(row · (norm × projection) / rms(row))`` and mixes the rows as they are
(arXiv 2603.15031); ``attended`` weighs normalised rows by one learned query and mixes the normalised rows.
Rows put side by side for the mix alone are inputs one by one, ``row_0`` the first; else ``rows`` is one tensor.
Legend: B batch, T tokens, R rows (snapshots and the running sum), H hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import float_cases
from shardwright.agents.structure.interpret import Sizes
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below, holder
from shardwright.agents.structure.patterns.rms_norm import normalised, sole_content
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

OPERATOR = "attention_residual"
RECOMPILED = "torch compiles the mix again for each number of rows, and stops at eight"
ROW = "row_"


class AttentionResidual(Pattern):
    """Weights of the rows and their mix, as one operator."""

    name = "attention_residual"
    version = 2
    title = "Attention residual"

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
            nodes = _rows(view, rows) | {"norm": leaves[0], "projection": leaves[1]}
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
        if set(leaves) not in ({"norm", "projection"}, {"query"}):
            return None
        around = below(nodes["norm"].target, y.module_path) if "norm" in nodes else None
        anchor = y.module_path if around is not None else holder(*(node.target for node in leaves.values()))
        names = {role: below(node.target, anchor) for role, node in leaves.items()}
        roles = {role: name for role, name in names.items() if name is not None}
        inputs = {role: node.id for role, node in nodes.items()}
        return self.bind(captured, graph, inputs, {"y": y.id}, constants, anchor, roles)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        rows = values["rows"] if "rows" in values else torch.stack(apart(values), dim=-2)
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
        rows = values["rows"] if "rows" in values else torch.cat([row.unsqueeze(-2) for row in apart(values)], dim=-2)
        hidden = rows.shape[-1]
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
        """Rows that differ, and weights that are all felt: among equal rows, or under one weight that is all but 1, the
        weights' gradients are nothing but rounding."""
        shapes = {role: sizes.shape(match.region.spec(role).shape) for role in match.region.inputs}
        rows = tuple(role for role in shapes if role == "rows" or role.startswith(ROW))
        cases = float_cases(shapes, seed=7, strided=rows)
        normal = cases["normal"]
        cases["one-hot"] |= {role: normal[role] for role in rows}
        for name in ("huge-row", "zero-row"):
            cases[name] |= {role: normal[role] for role in shapes if role not in rows[:1]}
        return cases

    def gradients(self, match: Match) -> tuple[str, ...]:
        return tuple(match.region.inputs)

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, lora_inside=False, device_types=("cuda",))
        return (
            VariantSpec("kernel", "shardwright", OPERATOR, kernel, forms=("scored",)),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=RECOMPILED),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        """A worker exchanges a module that gets the rows one by one and computes nothing but their mix."""
        if spec.provider != "shardwright":
            return ""
        if "rows" in match.region.inputs:
            return "the rows come as one tensor, and the operator reads each where it lies"
        return sole_content(match) or _called_otherwise(match)

    def must_verify(self, match: Match, spec: VariantSpec) -> tuple[str, ...]:
        return (OPERATOR,) if spec.op == OPERATOR else ()

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        if match.constants["form"] != "scored" or "rows" in match.region.inputs:
            return None
        from shardwright.kernels.attention_residual.reference import attention_residual_reference

        def run(values: Tensors) -> Tensors:
            eps = match.constants["eps"]
            return {"y": attention_residual_reference(apart(values), values["norm"], values["projection"], eps)}

        return run

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        from shardwright.kernels.attention_residual import contract

        made = {
            role: torch.empty(match.region.spec(role).shape, dtype=dtype, device="meta") for role in match.region.inputs
        }
        contract.check_static(apart(made), made["norm"], made["projection"], match.constants["eps"])
        return True

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        if "rows" in match.region.inputs:
            shape = match.region.spec("rows").shape
            return {"T": tokens, "R": shape[-2], "H": shape[-1]}
        rows = [role for role in match.region.inputs if role.startswith(ROW)]
        return {"T": tokens, "R": len(rows), "H": match.region.spec(rows[0]).shape[-1]}


def apart(values: Tensors) -> list[torch.Tensor]:
    """Rows in their order."""
    return [values[f"{ROW}{place}"] for place in range(sum(role.startswith(ROW) for role in values))]


def _rows(view: View, rows: OpNode) -> dict[str, OpNode]:
    """Rows by role: one by one where they are put side by side for this mix alone."""
    alone = rows.kind == "op" and rows.target == "stack" and rows.arguments.get("dim") == -2
    if not alone or len(view.graph.users(rows.id)) != 1 or len(set(rows.inputs)) != len(rows.inputs):
        return {"rows": rows}
    return {f"{ROW}{place}": view.operand(rows, place) for place in range(len(rows.inputs))}


def _called_otherwise(match: Match) -> str:
    """Why the module's forward is not (rows, projection); empty where it is."""
    inner = match.anchor.removeprefix(match.captured.module_path).removeprefix(".")
    given = list(inspect.signature(type(match.captured.module.get_submodule(inner)).forward).parameters)[1:]
    return (
        "" if given == ["rows", "projection"] else f"{match.anchor} takes {', '.join(given)}, not rows and a projection"
    )


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
