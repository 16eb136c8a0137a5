"""Reads sparse attention over pools of keys out of a canonical graph; what is read is spelled again and compared.

Legend as in :mod:`dsa_pooled_spelling`.
"""

from __future__ import annotations

from typing import Any

from shardwright.agents.structure.opaque_indexers import FIRST_PARAMETER, PARAMETERS
from shardwright.agents.structure.patterns.base import View
from shardwright.agents.structure.patterns.dsa_pooled_spelling import INDEXER
from shardwright.agents.structure.patterns.dsa_reading import Read, Unread, down, number, only, skip, width
from shardwright.schemas.graph import OpNode


def read_pooled(view: View, counted: OpNode) -> Read | None:
    """The attention whose mask is what ``counted`` (a ``scatter_add``) counts; ``None`` where it is another thing."""
    try:
        return _read(view, counted)
    except Unread:
        return None


def _read(view: View, counted: OpNode) -> Read:
    selected = down(view, view.operand(counted, 1), "clamp")
    mask = only(view, only(view, counted, "ne"), "reshape")
    attended = only(view, mask, "scaled_dot_product_attention")
    if attended.arguments.get("operands") != ["query", "key", "value", "attn_mask"]:
        raise Unread
    query, key, value = (view.operand(attended, at) for at in range(3))
    q = down(view, down(view, query, "permute"), "reshape")
    latent, weight, k_rot, nope = _keys(view, key, value)
    scale = attended.arguments.get("scale")
    inputs = {"q": q, "latent": latent, "k_rot": k_rot, "kv_b_weight": weight}
    constants: dict[str, Any] = {
        "nope": nope,
        "rope": 0,
        "value": width(value),
        "scale": width(query) ** -0.5 if scale is None else number(scale),
        "layout": "none",
        "index_layout": "none",
        "index_first": True,
    }
    o = only(view, only(view, attended, "permute"), "reshape")
    if selected.kind != "op":
        return Read({**inputs, "selected": selected}, {**constants, "form": "shared"}, o, None)
    if not view.is_op(selected, "pooled_choice", FIRST_PARAMETER + len(PARAMETERS)):
        raise Unread
    named = ("hidden", "q_latent", "valid", *INDEXER)
    chosen = {role: view.operand(selected, at) for at, role in enumerate(named)}
    told = selected.arguments
    more = {
        "form": "own",
        "rule": told["rule"],
        "index_heads": told["heads"],
        "k": told["top_k"],
        "pool": told["pool"],
        "tail": told["tail"],
        "index_width": _shape(chosen["index_k_weight"])[0],
    }
    return Read({**inputs, **chosen}, {**constants, **more}, o, selected)


def _keys(view: View, key: OpNode, value: OpNode) -> tuple[OpNode, OpNode, OpNode, int]:
    """Keys written in two parts, the rotated one without width → (latent, weight, rotated part, width of a key)."""
    written = down(view, key, "stale")
    copy = view.operand(key, 1) if written.target == "new_empty" else written
    if not view.is_op(copy, "copy", 2):
        raise Unread
    k_rot = skip(view, down(view, view.operand(copy, 1), "expand"), "reshape")
    if width(k_rot):
        raise Unread
    both = down(view, value, "slice")
    up = skip(view, both, "permute", "reshape")
    if not view.is_op(up, "linear", 2) or view.operand(up, 1).kind != "parameter":
        raise Unread
    return skip(view, view.operand(up), "reshape"), view.operand(up, 1), k_rot, width(both) - width(value)


def _shape(node: OpNode) -> tuple[int, ...]:
    if node.output is None:
        raise Unread
    return tuple(node.output.shape)
