"""Reads sparse latent attention out of a canonical graph: which values it takes, and with which constants.

Nothing is proved here: what is read is spelled again and compared node by node. So a reader follows one path to each
value and asks no more than it needs to tell the spellings apart.
Legend: B batch, S tokens, H heads, N, R, V widths of plain key, rotated key and value, D indexer width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.agents.structure.patterns.base import View
from shardwright.schemas.graph import OpNode

RANK = 4


@dataclass(frozen=True)
class Read:
    """One attention: its values by role, its constants, its results."""

    inputs: dict[str, OpNode]
    constants: dict[str, Any]
    o: OpNode
    indices: OpNode | None
    """The choice, where the region makes it."""


@dataclass(frozen=True)
class Turned:
    """A rotated value: what is rotated, by which tables, how its pairs lie."""

    x: OpNode
    cos: OpNode
    sin: OpNode
    layout: str


class Unread(Exception):
    """The graph is not spelled like the families that are read here."""


def read_attention(view: View, scatter: OpNode) -> Read | None:
    """The attention whose mask leaves out what ``scatter`` does not select; ``None`` where it is another thing."""
    try:
        return _read(view, scatter)
    except Unread:
        return None


def _read(view: View, scatter: OpNode) -> Read:
    left_out = only(view, scatter, "reshape")
    masked, mask, least = _masked(view, left_out)
    selected = down(view, view.operand(scatter, 1), "cast")
    attended = _attended(view, masked)
    q, q_rot = _joined(view, attended.query, "permute")
    k_rot, latent, weight, nope, value = _keys(view, attended.key, attended.value)
    if (q_rot.cos, q_rot.sin, q_rot.layout) != (k_rot.cos, k_rot.sin, k_rot.layout):
        raise Unread
    o, gate = _result(view, attended.o)
    inputs = {
        "q": q,
        "latent": latent,
        "k_rot": skip(view, k_rot.x, "reshape"),
        "kv_b_weight": weight,
        "cos": _table(view, q_rot.cos, q_rot.layout),
        "sin": _table(view, q_rot.sin, q_rot.layout),
        "mask": mask,
        **({} if gate is None else {"gate": gate}),
        **({} if attended.sinks is None else {"sinks": attended.sinks}),
    }
    constants: dict[str, Any] = {
        "layout": q_rot.layout,
        "nope": nope,
        "rope": width(q_rot.x),
        "value": value,
        "scale": attended.scale,
        **({} if least is None else {"least": least}),
    }
    if selected.kind != "op":
        return Read({**inputs, "selected": selected}, {**constants, "form": "shared"}, o, None)
    index, more = _choice(view, selected)
    return Read({**inputs, **index}, {**constants, **more, "form": "own"}, o, selected)


def _masked(view: View, left_out: OpNode) -> tuple[OpNode, OpNode, float | None]:
    """``mask & ~left_out`` or ``masked_fill(mask, left_out, least)`` → (result, mask, least)."""
    for user in view.graph.users(left_out.id):
        if view.is_op(user, "masked_fill", 2) and view.operand(user, 1) == left_out:
            least = user.arguments.get("value")
            if not isinstance(least, float):
                raise Unread
            return user, view.operand(user), least
        if view.is_op(user, "bitwise_not", 1):
            both = only(view, user, "__and__")
            return both, next(a for a, b in view.both_orders(both) if b == user), None
    raise Unread


@dataclass(frozen=True)
class Attended:
    """A product of all queries and keys under a mask."""

    query: OpNode
    key: OpNode
    value: OpNode
    scale: float
    o: OpNode
    sinks: OpNode | None


def _attended(view: View, masked: OpNode) -> Attended:
    for user in view.graph.users(masked.id):
        if user.target == "scaled_dot_product_attention":
            if user.arguments.get("operands") != ["query", "key", "value", "attn_mask"]:
                raise Unread
            query, key, value = (view.operand(user, at) for at in range(3))
            scale = user.arguments.get("scale")
            scale = width(query) ** -0.5 if scale is None else scale
            return Attended(query, key, value, number(scale), user, None)
        if view.is_op(user, "add", 2):
            return _with_sinks(view, user, masked)
    raise Unread


def _with_sinks(view: View, total: OpNode, masked: OpNode) -> Attended:
    """``softmax([q kᵀ · scale + mask, sinks])`` without its last column, times v."""
    scores = next(a for a, b in view.both_orders(total) if b == masked)
    product = view.operand(scores)
    if not view.is_op(scores, "mul", 1) or not view.is_op(product, "matmul", 2):
        raise Unread
    joined = only(view, total, "cat")
    sinks = skip(view, view.operand(joined, 1), "expand", "reshape")
    shifted = only(view, joined, "sub")
    shares = skip_up(view, only(view, only(view, shifted, "softmax"), "slice"), "cast")
    o = only(view, shares, "matmul")
    key = down(view, view.operand(product, 1), "permute")
    return Attended(view.operand(product), key, view.operand(o, 1), number(scores.arguments.get("other")), o, sinks)


def _joined(view: View, query: OpNode, *between: str) -> tuple[OpNode, Turned]:
    """Queries of a plain and a rotated part → what both are cut from, and the rotation."""
    if not view.is_op(query, "cat", 2):
        raise Unread
    plain, rotated = view.operand(query), _turned(view, view.operand(query, 1))
    source = down(view, plain, "slice")
    if down(view, rotated.x, "slice") != source:
        raise Unread
    return skip(view, source, "reshape", *between), rotated


def _keys(view: View, key: OpNode, value: OpNode) -> tuple[Turned, OpNode, OpNode, int, int]:
    """(rotated part of keys, latent, weight of the up-projection, N, V)."""
    copies = [node for node in _stale(view, key) if node.target == "copy"]
    turned = next((view.operand(copy, 1) for copy in copies if view.operand(copy, 1).target == "expand"), None)
    if turned is None:
        raise Unread
    both = down(view, value, "slice")
    up = skip(view, both, "permute", "reshape")
    if not view.is_op(up, "linear", 2) or view.operand(up, 1).kind != "parameter":
        raise Unread
    latent = skip(view, view.operand(up), "reshape")
    whole, wide = width(both), width(value)
    return _turned(view, down(view, turned, "expand")), latent, view.operand(up, 1), whole - wide, wide


def _stale(view: View, node: OpNode) -> list[OpNode]:
    """Values under a chain of writes to one tensor."""
    if node.target != "stale":
        raise Unread
    return [view.graph.by_id[i] for i in node.inputs]


def _turned(view: View, node: OpNode) -> Turned:
    """A rotation: of neighbours ``cat(a·cos − b·sin, b·cos + a·sin)``, of halves ``x·cos + [−x₂, x₁]·sin``."""
    if view.is_op(node, "cat", 2) and view.is_op(view.operand(node), "sub", 2):
        first = view.operand(node)
        (a, cos), (b, sin) = (_by_table(view, view.operand(first, at)) for at in range(2))
        x = down(view, a, "slice")
        if down(view, b, "slice") != x:
            raise Unread
        return Turned(x, cos, sin, "interleaved")
    if view.is_op(node, "add", 2):
        for kept, swapped in view.both_orders(node):
            if not view.is_op(kept, "mul", 2) or not view.is_op(swapped, "mul", 2):
                continue
            (x, cos), (y, sin) = _by_table(view, kept), _by_table(view, swapped)
            if view.is_op(y, "cat", 2) and not view.is_op(x, "cat", 2):
                return Turned(x, cos, sin, "half-split")
    raise Unread


def _by_table(view: View, product: OpNode) -> tuple[OpNode, OpNode]:
    """A product of a value and a table → (value, table); a table is a view of an input of three dimensions."""
    if view.is_op(product, "mul", 2):
        for x, table in view.both_orders(product):
            if _is_table(skip(view, table, "reshape", "slice")) and not _is_table(skip(view, x, "reshape", "slice")):
                return x, table
    raise Unread


def _is_table(node: OpNode) -> bool:
    return node.kind == "input" and node.output is not None and len(node.output.shape) == RANK - 1


def _table(view: View, node: OpNode, layout: str) -> OpNode:
    return skip(view, node, "reshape", "slice") if layout == "interleaved" else skip(view, node, "reshape")


def _result(view: View, attended: OpNode) -> tuple[OpNode, OpNode | None]:
    """(heads side by side, gate before its sigmoid)."""
    o, gate = only(view, attended, "permute"), None
    if any(user.target == "mul" for user in view.graph.users(o.id)):
        product = only(view, o, "mul")
        sigmoid = next((a for a, b in view.both_orders(product) if b == o), None)
        gate = skip(view, down(view, sigmoid, "sigmoid"), "reshape")
        o = product
    return only(view, o, "reshape"), gate


def _choice(view: View, selected: OpNode) -> tuple[dict[str, OpNode], dict[str, Any]]:
    """The indexer's values and constants."""
    top = down(view, down(view, selected, "cast"), "getitem")
    total = view.operand(top)
    if not view.is_op(top, "topk", 1) or total.target not in ("masked_fill", "add"):
        raise Unread
    summed = next((n for n in map(view.graph.by_id.get, total.inputs) if n and n.target == "reshape"), None)
    product = down(view, summed, "reshape")
    if not view.is_op(product, "matmul", 2):
        raise Unread
    factors, weights = _factors(view, skip(view, view.operand(product), "reshape"))
    dots, factor = down(view, view.operand(product, 1), "relu"), 1.0
    if view.is_op(dots, "mul", 1):
        factor, dots = number(dots.arguments.get("other")), view.operand(dots)
    q = skip(view, view.operand(dots), "cast")
    k = skip(view, view.operand(dots, 1), "reshape", "cast", "permute")
    q_parts, k_parts = (_half_turned(view, x) for x in (q, k))
    if q_parts[1:] != k_parts[1:] or not view.is_op(dots, "matmul", 2):
        raise Unread
    constants = {
        "k": int(str(top.arguments.get("k"))),
        "index_width": width(q),
        "index_layout": q_parts[1],
        "index_first": q_parts[2],
        "score_factor": factor,
        "weight_factors": factors,
    }
    return {"index_q": q_parts[0], "index_k": k_parts[0], "index_weights": weights}, constants


def _factors(view: View, node: OpNode) -> tuple[list[float], OpNode]:
    """Numbers that a value was multiplied by, first to last, and the value without its cast to fp32."""
    found: list[float] = []
    while view.is_op(node, "mul", 1):
        found.insert(0, number(node.arguments.get("other")))
        node = view.operand(node)
    return found, skip(view, node, "cast")


def _half_turned(view: View, node: OpNode) -> tuple[OpNode, str, bool]:
    """``cat`` of a rotated and a plain part → (what both are cut from, layout, rotated part first)."""
    if not view.is_op(node, "cat", 2):
        raise Unread
    for first in (True, False):
        plain = view.operand(node, 1 if first else 0)
        if plain.target != "slice":
            continue
        turned = _turned(view, view.operand(node, 0 if first else 1))
        source = down(view, plain, "slice")
        if down(view, turned.x, "slice") == source:
            return skip(view, source, "reshape"), turned.layout, first
    raise Unread


def only(view: View, node: OpNode, target: str) -> OpNode:
    """The one user of a kind."""
    found = [user for user in view.graph.users(node.id) if user.target == target]
    if len(found) != 1:
        raise Unread
    return found[0]


def down(view: View, node: OpNode | None, target: str) -> OpNode:
    """The operand of an operation of that kind; of any other value the value itself where it is a leaf."""
    if node is None or (node.kind == "op" and node.target != target):
        raise Unread
    return view.operand(node) if node.kind == "op" else node


def skip(view: View, node: OpNode, *targets: str) -> OpNode:
    """The value under any of these views and casts."""
    while node.kind == "op" and node.target in targets:
        node = view.operand(node)
    return node


def skip_up(view: View, node: OpNode, target: str) -> OpNode:
    """The cast of a value where its only user is one."""
    users = view.graph.users(node.id)
    return users[0] if len(users) == 1 and users[0].target == target else node


def width(node: OpNode) -> int:
    """Of the last dimension."""
    if node.output is None or not node.output.shape:
        raise Unread
    return node.output.shape[-1]


def number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unread
    return float(value)
