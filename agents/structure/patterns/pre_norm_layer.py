"""Whether a decoder layer is exactly ``h = x + branch(norm₁ x)``, ``out = h + mlp(norm₂ h)``.

A worker that computes ``h`` and ``norm₂ h`` in one operator must run the rest of the layer itself. It may do so only
where the layer's own forward is these two sums and nothing else, over four children that read what is said here.
"""

from __future__ import annotations

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.patterns.base import View, below
from shardwright.schemas.graph import OpNode


def pre_norm_roles(graph: CanonicalGraph, layer: str, total: OpNode, second: str) -> dict[str, str]:
    """The children's names by role (``first_norm``, ``branch``, ``mlp``); empty where the layer has another form.

    Args:
        layer: module path of the layer.
        total: the sum that the norm ``second`` reads.
        second: the norm's name in the layer.
    """
    view = View(graph)
    ops = [node for node in graph.nodes if node.kind == "op"]
    if len(graph.outputs) != 1:
        return {}
    last = graph.by_id[graph.outputs[0]]
    own = {node.id for node in ops if node.module_path == layer}
    if own != {total.id, last.id} or last == total or not all(view.is_op(n, "add", 2) for n in (total, last)):
        return {}
    residual = [view.operand(total, i) for i in (0, 1) if view.operand(total, i).kind == "input"]
    branch = [_child(view.operand(total, i), layer) for i in (0, 1) if view.operand(total, i).kind == "op"]
    mlp = [_child(view.operand(last, i), layer) for i in (0, 1) if view.operand(last, i) != total]
    if len(residual) != 1 or len(branch) != 1 or len(mlp) != 1:
        return {}
    first = {_child(user, layer) for user in graph.users(residual[0].id) if user.id not in own}
    children = {_child(node, layer) for node in ops if node.id not in own}
    if len(first) != 1 or len(children) != 4 or children != {*first, *branch, *mlp, second} or None in children:
        return {}
    roles = {"first_norm": str(*first), "branch": str(branch[0]), "mlp": str(mlp[0])}
    return roles if _reads_as_said(graph, ops, layer, residual[0], total, roles, second) else {}


def _child(node: OpNode, layer: str) -> str | None:
    """The child of the layer that an operation runs in."""
    inner = below(node.module_path, layer)
    return None if inner is None or node.module_path == layer else inner.split(".", 1)[0]


def _reads_as_said(
    graph: CanonicalGraph, ops: list[OpNode], layer: str, x: OpNode, total: OpNode, roles: dict[str, str], second: str
) -> bool:
    """Each child reads only what its role gives it; the branch may read the layer's other inputs too."""
    sources = {roles["first_norm"]: {x.id}, second: {total.id}, roles["branch"]: set(), roles["mlp"]: set()}
    feeders = {roles["branch"]: roles["first_norm"], roles["mlp"]: second}
    for node in ops:
        child = _child(node, layer)
        if child is None:
            continue
        for operand in (graph.by_id[i] for i in node.inputs):
            if operand.kind in ("parameter", "buffer") or operand.id in sources[child]:
                continue
            if operand.kind == "op" and _child(operand, layer) in (child, feeders.get(child)):
                continue
            if operand.kind == "input" and child == roles["branch"] and operand.id != x.id:
                continue
            return False
    return True
