"""Reads a linear-attention layer out of a canonical graph, around its recurrence: what it takes, how it is spelled.

Nothing is proved here: what is read is spelled again and compared node by node. So a reader follows one path to each
value and asks no more than it needs to tell the spellings apart.
Legend: B batch, T tokens, H key heads, HV value heads, K key width, V value width, J taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwright.agents.structure.patterns.base import Match, View
from shardwright.kernels.short_conv.contract import TAPS
from shardwright.schemas.graph import OpNode, TensorSpec

HEADS_RANK = 4
"""Dimensions of q, k, v, and of a decay that each channel has its own of."""
PAIR = 2


class Unread(Exception):
    """The layer is not spelled like the families that are read here; says what is not."""


@dataclass(frozen=True)
class Layer:
    """One layer: its values by role, how it is spelled, its result."""

    inputs: dict[str, OpNode]
    constants: dict[str, Any]
    y: OpNode


def read_layer(view: View, rule: OpNode, norms: tuple[Match, ...]) -> Layer:
    """The layer around a recurrence.

    Args:
        norms: gated norms of the same graph.

    Raises:
        Unread: the first thing that is spelled otherwise.
    """
    q, k, v, g, beta = (view.graph.by_id[i] for i in rule.inputs)
    convolved, unit = _units(view, rule, q, k)
    inputs, constants = _convolutions(view, (*convolved, v))
    decay, how = _decay(view, g)
    raw = _sigmoid_of(view, beta)
    y, normed, after = _normed(view, rule, norms)
    constants |= {"rule": rule.arguments["rule"], "unit": bool(rule.arguments.get("unit")), **unit, **how, **after}
    constants |= {"beta_wide": view.is_op(raw, "cast", 1)}
    return Layer({**inputs, **decay, "beta": view.through(raw, "cast"), **normed}, constants, y)


def _units(view: View, rule: OpNode, q: OpNode, k: OpNode) -> tuple[tuple[OpNode, OpNode], dict[str, Any]]:
    """q and k before their division by their length, where the layer and not its rule divides."""
    if rule.arguments.get("unit"):
        return (q, k), {}
    if not view.is_op(q, "mul", 1) or not isinstance(q.arguments.get("other"), float):
        raise Unread("neither the layer nor its rule scales the queries")
    found = []
    for one in (view.operand(q), k):
        pairs = view.both_orders(one) if one.target == "mul" else ()
        found += [view.through(value, "cast") for value, length in pairs if length.target == "rsqrt"]
    if len(found) != PAIR:
        raise Unread("neither the layer nor its rule divides queries and keys by their length")
    return (found[0], found[1]), {"query_scale": q.arguments["other"]}


def _convolutions(view: View, heads: tuple[OpNode, ...]) -> tuple[dict[str, OpNode], dict[str, Any]]:
    """Under q, k and v ``[B, T, heads, width]``: one convolution over all channels, or one for each."""
    rows = [_under(view, one, "reshape", "the recurrence reads no heads of a convolution's result") for one in heads]
    merged = all(one.target == "slice" for one in rows) and len({one.inputs for one in rows}) == 1
    sources, weights = {}, {}
    for role, top in (("", view.operand(rows[0])),) if merged else zip(("q", "k", "v"), rows, strict=True):
        conv = _convolution(view, top)
        source = view.through(view.operand(conv), "permute", "cast")
        weights[f"{role}_conv_weight" if role else "conv_weight"] = _weight(view, conv)
        sources[role or "mixed"] = source
    if merged and view.is_op(sources["mixed"], "cat", len(rows)):
        sources = {role: view.operand(sources["mixed"], at) for at, role in enumerate(("q", "k", "v"))}
    (*_, H, K), (*_, HV, V) = _shape(heads[0]), _shape(heads[2])
    sizes = {"heads": H, "value_heads": HV, "key_width": K, "value_width": V}
    return {**sources, **weights}, {"conv": "merged" if merged else "apart", **sizes}


def _convolution(view: View, top: OpNode) -> OpNode:
    """The convolution whose first T results, after SiLU, are ``top``."""
    activated, node = False, top
    while node.target in ("permute", "cast", "silu", "slice") and len(node.inputs) == 1:
        activated = activated or node.target == "silu"
        node = view.operand(node)
    if node.target != "conv1d":
        raise Unread(f"queries, keys and values come from {node.target or node.kind}, not from a convolution")
    if len(node.inputs) != PAIR:
        raise Unread("the convolution has a bias")
    if not activated:
        raise Unread("the convolution is not followed by SiLU")
    return node


def _weight(view: View, conv: OpNode) -> OpNode:
    weight = view.through(view.operand(conv, 1), "cast", "reshape")
    if weight.kind != "parameter":
        raise Unread("the convolution's weight is computed")
    taps = _shape(weight)[-1]
    if taps not in TAPS:
        raise Unread(f"the convolution has {taps} taps; the operator takes {TAPS[0]} to {TAPS[-1]}")
    return weight


def _decay(view: View, g: OpNode) -> tuple[dict[str, OpNode], dict[str, Any]]:
    """``bound · σ(rate · (raw + bias))`` or ``−rate · softplus(raw + bias)``, rate = exp(A_log)."""
    channels = len(_shape(g)) == HEADS_RANK
    how: dict[str, Any] = {"form": "channels" if channels else "heads", "decay_narrow": g.target == "cast"}
    inner = view.operand(g) if g.target == "cast" else g
    if view.is_op(inner, "mul", 1) and view.operand(inner).target == "sigmoid":
        bound = inner.arguments.get("other")
        if not isinstance(bound, float):
            raise Unread("the decay's bound is no number")
        product = view.operand(view.operand(inner))
        how |= {"gate": "bounded", "lower_bound": bound}
        pairs = list(view.both_orders(product)) if product.target == "mul" else []
    elif view.is_op(inner, "mul", PAIR):
        pairs = [(view.operand(a), b) for a, b in view.both_orders(inner) if a.target == "neg"]
        how |= {"gate": "softplus"}
    else:
        raise Unread(f"the decay is made by {inner.target or inner.kind}, not by a bounded or a softplus gate")
    for rate, opened in pairs:
        steps, a_log = _rate(view, rate)
        if a_log is None:
            continue
        biased, spelled = _opened(view, opened, how["gate"])
        raw, bias, sum_spelled = _biased(view, biased, channels)
        return {"decay": raw, "a_log": a_log, "dt_bias": bias}, {**how, **steps, **spelled, **sum_spelled}
    raise Unread("the decay's rate is not the exponential of one parameter")


def _rate(view: View, node: OpNode) -> tuple[dict[str, Any], OpNode | None]:
    """``exp(A_log)`` with casts, views and a cut, in the order in which they are computed."""
    steps, leaf = _chain(view, node, "exp", "cast", "reshape", "slice")
    names = [one.target for one in reversed(steps)]
    shaped = [list(_shape(one)) for one in steps if one.target == "reshape"]
    fits = leaf.kind == "parameter" and names.count("exp") == 1
    return {"rate": " ".join(names), "rate_shape": shaped[0] if shaped else []}, leaf if fits else None


def _opened(view: View, node: OpNode, gate: str) -> tuple[OpNode, dict[str, Any]]:
    """The biased gate under a softplus, the library's or one that is spelled out."""
    if gate == "bounded":
        return node, {}
    if view.is_op(node, "softplus", 1):
        return view.operand(node), {"softplus": "library"}
    if view.is_op(node, "where") and len(node.inputs) == PAIR + 1:
        return view.operand(node, 1), {"softplus": "spelled"}
    raise Unread(f"the decay is opened by {node.target or node.kind}, not by softplus")


def _biased(view: View, node: OpNode, channels: bool) -> tuple[OpNode, OpNode, dict[str, Any]]:
    """raw and bias under their sum; whether heads are parted before or after it."""
    total = view.through(node, "reshape")
    if total.target != "add" or len(total.inputs) != PAIR:
        raise Unread("the decay's gate has no bias")
    for raw, other in view.both_orders(total):
        steps, bias = _chain(view, other, "cast", "reshape")
        if bias.kind != "parameter":
            continue
        shaped = [list(_shape(one)) for one in steps if one.target == "reshape"]
        how = {"bias_shape": shaped[0] if shaped else [], "bias_wide": any(one.target == "cast" for one in steps)}
        how["parted"] = ("before" if total is node else "after") if channels else ""
        value = view.through(raw, "cast", "reshape") if channels else view.through(raw, "cast")
        return value, bias, how
    raise Unread("the decay's gate has no bias")


def _sigmoid_of(view: View, beta: OpNode) -> OpNode:
    if not view.is_op(beta, "sigmoid", 1):
        raise Unread(f"the step size is made by {beta.target or beta.kind}, not by a sigmoid")
    return view.operand(beta)


def _normed(view: View, rule: OpNode, norms: tuple[Match, ...]) -> tuple[OpNode, dict[str, OpNode], dict[str, Any]]:
    """The gated norm that alone reads the recurrence, and the layer's rows behind it."""
    by_id = view.graph.by_id
    for norm in norms:
        x = by_id[norm.region.inputs["x"]]
        if view.through(x, "reshape", "cast") != rule:
            continue
        out = view.graph.users(norm.region.outputs["y"])
        if len(out) != 1 or out[0].target != "reshape":
            raise Unread("the normed heads are not joined to rows")
        gate = view.through(by_id[norm.region.inputs["gate"]], "reshape")
        constants = {
            "eps": norm.constants["eps"],
            "act": norm.constants["act"],
            "norm": norm.constants["form"],
            "norm_rows": len(_shape(x)) == PAIR,
            "rule_cast": _spec(rule).dtype != _spec(x).dtype,
        }
        return out[0], {"gate": gate, "norm_weight": by_id[norm.region.inputs["weight"]]}, constants
    raise Unread("no gated norm reads the recurrence's result")


def _chain(view: View, node: OpNode, *targets: str) -> tuple[list[OpNode], OpNode]:
    """The named one-operand operations above a value, the last first, and the value."""
    steps = []
    while node.kind == "op" and node.target in targets and len(node.inputs) == 1:
        steps.append(node)
        node = view.operand(node)
    return steps, node


def _under(view: View, node: OpNode, target: str, otherwise: str) -> OpNode:
    if not view.is_op(node, target, 1):
        raise Unread(otherwise)
    return view.operand(node)


def _spec(node: OpNode) -> TensorSpec:
    if node.output is None:
        raise Unread(f"{node.target} gives no tensor")
    return node.output


def _shape(node: OpNode) -> tuple[int, ...]:
    return _spec(node).shape
