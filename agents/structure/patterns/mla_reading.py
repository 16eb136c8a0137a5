"""How latent attention is spelled: the nodes and constants of both of its forms, read off a canonical graph.

Legend as in :mod:`mla`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.agents.structure.patterns.base import View
from shardwright.schemas.graph import OpNode

HEADS_FIRST = {"dims": [-4, -2, -3, -1]}
TURNED = ([-2, -1], [-3, -1, -2], [-4, -3, -1, -2])


@dataclass(frozen=True)
class Reading:
    """One latent attention."""

    nodes: dict[str, OpNode]
    constants: dict[str, Any]
    y: OpNode


def read_expanded(view: View, product: OpNode) -> Reading | None:
    """The latent attention that ends in a scaled product; ``None`` where keys are made in another way."""
    slots = product.arguments.get("operands")
    wanted = ["query", "key", "value", "attn_mask"][: len(product.inputs)]
    options = {k: v for k, v in product.arguments.items() if k != "operands"}
    if slots != wanted or set(options) - {"scale", "is_causal"}:
        return None
    query, key, value = (view.operand(product, i) for i in range(3))
    if not view.is_op(value, "slice", 1):
        return None
    both = view.operand(value)
    made = _written(view, key) or _joined(view, key)
    expansion = _expansion(view, both)
    if made is None or expansion is None or value.output is None:
        return None
    how, nope, rot = made
    if view.operand(nope) != both or nope.output is None or both.output is None:
        return None
    width = nope.output.shape[-1]
    cut = [{"dim": -1, "start": 0, "stop": width}, {"dim": -1, "start": width, "stop": both.output.shape[-1]}]
    if [nope.arguments, value.arguments] != cut or rot.output is None or len(rot.output.shape) != 4:
        return None
    if not rot.output.shape[-1]:
        return None  # keys without a shared part: of a layer with an indexer it is a region of another pattern
    latent, weight, lifted = expansion
    nodes = {"query": query, "latent": latent, "weight": weight, "rot": rot}
    if len(product.inputs) > 3:
        nodes["mask"] = view.operand(product, 3)
    constants = {"form": "expanded", "key": how, "lifted": lifted, "heads": both.output.shape[1], "nope": width}
    return Reading(nodes, {**constants, "value": value.output.shape[-1], **options}, product)


def _expansion(view: View, both: OpNode) -> tuple[OpNode, OpNode, bool] | None:
    """Heads first of ``linear(latent)`` → (latent ``[B, T, L]``, weight, whether it was given a head dimension)."""
    if not view.is_op(both, "permute", 1) or both.arguments != HEADS_FIRST:
        return None
    shaped = view.operand(both)
    if not view.is_op(shaped, "reshape", 1) or not view.is_op(view.operand(shaped), "linear", 2):
        return None
    made = view.operand(shaped)
    latent, weight = view.operand(made), view.operand(made, 1)
    lifted = view.is_op(latent, "reshape", 1)
    latent = view.operand(latent) if lifted else latent
    if weight.kind != "parameter" or latent.output is None or len(latent.output.shape) != 3:
        return None
    return latent, weight, lifted


def _joined(view: View, key: OpNode) -> tuple[str, OpNode, OpNode] | None:
    """``cat(nope, expand(rot))``."""
    if not view.is_op(key, "cat", 2) or key.arguments.get("dim") != -1:
        return None
    nope, shared = view.operand(key), view.operand(key, 1)
    if not view.is_op(shared, "expand", 1) or not view.is_op(nope, "slice", 1):
        return None
    return "joined", nope, view.operand(shared)


def _written(view: View, key: OpNode) -> tuple[str, OpNode, OpNode] | None:
    """``new_empty`` with both parts copied into it, the own part first."""
    if not view.is_op(key, "stale", 2):
        return None
    empty, second = view.operand(key), view.operand(key, 1)
    if not view.is_op(empty, "new_empty", 1) or not view.is_op(second, "copy", 2):
        return None
    place, shared = view.operand(second), view.operand(second, 1)
    between = view.operand(place) if view.is_op(place, "slice", 1) else place
    if not view.is_op(between, "stale", 2) or view.operand(between) != empty or not view.is_op(shared, "expand", 1):
        return None
    first = view.operand(between, 1)
    if not view.is_op(first, "copy", 2) or not view.is_op(view.operand(first, 1), "slice", 1):
        return None
    return "written", view.operand(first, 1), view.operand(shared)


def read_absorbed(view: View, softmax: OpNode) -> Reading | None:
    """The latent attention around a softmax whose scores are two products; ``None`` where they are not."""
    scored = view.operand(softmax)
    scored = view.operand(scored) if view.is_op(scored, "cast", 1) else scored
    nodes: dict[str, OpNode] = {}
    if view.is_op(scored, "add", 2):
        for scores, mask in view.both_orders(scored):
            if view.is_op(scores, "mul", 1):
                nodes["mask"], scored = mask, scores
                break
    scale = scored.arguments.get("other")
    if softmax.arguments != {"dim": [-1]} or not view.is_op(scored, "mul", 1) or not isinstance(scale, float):
        return None
    total = view.operand(scored)
    if not view.is_op(total, "add", 2):
        return None
    for own, shared in view.both_orders(total):
        found = _absorbed_scores(view, own, shared)
        if found is not None:
            return _absorbed_result(view, softmax, nodes | found[0], {**found[1], "scale": scale})
    return None


def _absorbed_scores(view: View, own: OpNode, shared: OpNode) -> tuple[dict[str, OpNode], dict[str, Any]] | None:
    """``(q Wₖ) cᵀ`` and ``q_rot rotᵀ``."""
    if not view.is_op(own, "matmul", 2) or not view.is_op(shared, "matmul", 2):
        return None
    query, latent = view.operand(own), _turned(view, view.operand(own, 1))
    rot = _turned(view, view.operand(shared, 1))
    if latent is None or rot is None or not view.is_op(query, "matmul", 2):
        return None
    part = view.operand(query, 1)
    rows = _rows(view, part)
    if rows is None or part.arguments.get("start") != 0:
        return None
    nodes = {
        "query": view.operand(query),
        "query_rot": view.operand(shared),
        "latent": latent,
        "rot": rot,
        "weight": rows[0],
    }
    return nodes, {"form": "absorbed", "heads": rows[1][0], "nope": part.arguments["stop"]}


def _absorbed_result(
    view: View, softmax: OpNode, nodes: dict[str, OpNode], constants: dict[str, Any]
) -> Reading | None:
    """``(p c) Wᵥᵀ``."""
    narrowed = [n for n in view.graph.users(softmax.id) if view.is_op(n, "cast", 1)]
    weights = narrowed[0] if len(narrowed) == 1 else softmax
    for mixed in view.graph.users(weights.id):
        if not view.is_op(mixed, "matmul", 2) or view.operand(mixed, 1) != nodes["latent"]:
            continue
        for y in view.graph.users(mixed.id):
            part = _turned(view, view.operand(y, 1)) if view.is_op(y, "matmul", 2) else None
            rows = _rows(view, part) if part is not None else None
            if part is None or rows is None or rows[0] != nodes["weight"]:
                continue
            if (part.arguments.get("start"), part.arguments.get("stop")) == (constants["nope"], rows[1][1]):
                return Reading(nodes, {**constants, "value": rows[1][1] - constants["nope"]}, y)
    return None


def _turned(view: View, node: OpNode) -> OpNode | None:
    """The value whose last two dimensions a node swaps."""
    return view.operand(node) if view.is_op(node, "permute", 1) and node.arguments.get("dims") in TURNED else None


def _rows(view: View, part: OpNode) -> tuple[OpNode, tuple[int, ...]] | None:
    """Rows of the expansion's matrix by head → (weight, ``[N, D + V, L]``)."""
    if not view.is_op(part, "slice", 1) or part.arguments.get("dim") != -2:
        return None
    by_head = view.operand(part)
    if not view.is_op(by_head, "reshape", 1) or view.operand(by_head).kind != "parameter" or by_head.output is None:
        return None
    return view.operand(by_head), by_head.output.shape
