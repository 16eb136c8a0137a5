"""Reads gated latent attention without rotation out of a canonical graph, dense or over chosen keys.

What is read is spelled again and compared node by node, so a reader asks no more than it needs to name the values.
Legend as in :mod:`mla_gated_spelling`.
"""

from __future__ import annotations

from typing import Any

from shardwright.agents.structure.patterns.base import View
from shardwright.agents.structure.patterns.dsa_reading import Read, Unread, down, number, only, skip, width
from shardwright.agents.structure.patterns.mla_reading import read_expanded
from shardwright.schemas.graph import OpNode


def read_gated(view: View, product: OpNode) -> Read | None:
    """The gated attention around a scaled product; ``None`` where it is another thing."""
    read = read_expanded(view, product)
    if read is None or read.constants["key"] != "joined":
        return None
    try:
        query, told = read.nodes["query"], read.constants
        q, k_rot = skip(view, query, "permute", "reshape"), skip(view, read.nodes["rot"], "reshape")
        gate, y = _gated(view, only(view, only(view, product, "permute"), "reshape"))
        inputs = {"q": q, "latent": read.nodes["latent"], "k_rot": k_rot, "kv_b_weight": read.nodes["weight"]}
        constants: dict[str, Any] = {
            "heads": told["heads"],
            "nope": told["nope"],
            "rope": width(k_rot),
            "value": told["value"],
            "scale": told.get("scale") or width(query) ** -0.5,
            "default_scale": "scale" not in told,
            "layout": "none",
        }
        mask = read.nodes.get("mask")
        if mask is None or mask.kind == "input":
            masked = {} if mask is None else {"mask": mask}
            return Read({**inputs, "gate": gate, **masked}, {**constants, "form": "dense"}, y, None)
        index, more = _choice(view, mask)
        return Read({**inputs, "gate": gate, **index}, {**constants, **more, "form": "own"}, y, None)
    except Unread:
        return None


def _gated(view: View, o: OpNode) -> tuple[OpNode, OpNode]:
    """``o · σ(gate)`` → (gate before its sigmoid, product)."""
    y = only(view, o, "mul")
    for factor, other in view.both_orders(y):
        under = skip(view, factor, "cast")
        if other == o and view.is_op(under, "sigmoid", 1):
            return skip(view, view.operand(under), "cast"), y
    raise Unread


def _choice(view: View, mask: OpNode) -> tuple[dict[str, OpNode], dict[str, Any]]:
    """The indexer's values and constants, and the mask that the model was given where it was."""
    both = down(view, mask, "reshape")
    if not view.is_op(both, "__and__", 2):
        raise Unread
    kept, seen = next(((a, b) for a, b in view.both_orders(both) if a.target == "scatter"), (both, both))
    top = down(view, skip(view, view.operand(kept, 1), "cast"), "getitem") if kept != both else both
    if not view.is_op(top, "topk", 1) or not view.is_op(view.operand(top), "masked_fill", 2):
        raise Unread
    dots, weights = _head(view, view.operand(view.operand(top)))
    q, factor = _scaled(view, down(view, view.operand(dots), "select"))
    shares, weight_factor = _scaled(view, down(view, skip(view, weights, "reshape"), "select"))
    k = skip(view, view.operand(dots, 1), "permute", "cast")
    given = {"mask": down(view, seen, "select")} if seen.target == "select" else {}
    heads, D = width(shares), width(k)
    constants = {
        "k": int(str(top.arguments.get("k"))),
        "index_heads": heads,
        "index_width": D,
        "index_layout": "none",
        "index_first": True,
        "score_factor": factor,
        "weight_factor": weight_factor,
    }
    return {"index_q": q, "index_k": k, "index_weights": shares, **given}, constants


def _head(view: View, total: OpNode) -> tuple[OpNode, OpNode]:
    """A sum over heads of ``w ReLU(q kᵀ)`` → the product and the weight of some head."""
    stack = [total]
    while stack:
        node = stack.pop()
        if view.is_op(node, "add", 2):
            stack += [view.operand(node, at) for at in (0, 1)]
        elif view.is_op(node, "mul", 2):
            for relu, weights in view.both_orders(node):
                if view.is_op(relu, "relu", 1) and view.is_op(view.operand(relu), "matmul", 2):
                    return view.operand(relu), weights
    raise Unread


def _scaled(view: View, node: OpNode) -> tuple[OpNode, float]:
    """``x · number`` in fp32 → (x, number)."""
    if not view.is_op(node, "mul", 1):
        raise Unread
    return skip(view, view.operand(node), "reshape", "cast"), number(node.arguments.get("other"))
