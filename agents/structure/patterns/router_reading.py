"""How a router is spelled: read off its canonical graph, and spelled again from what was read.

``ids = top-k(pick)``, ``weights = f(score at ids)``, with ``score = softmax or sigmoid (x Wᵀ)`` and ``pick`` the score
with a bias or with all but the best groups struck out. Legend: T tokens, E experts, K chosen, G groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.agents.structure.patterns.base import Tensors, View
from shardwright.schemas.graph import OpNode

SCORINGS = ("softmax", "sigmoid")


@dataclass
class Reading:
    """Nodes of one router and the constants of its spelling."""

    nodes: dict[str, OpNode] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


def read_router(view: View, top: OpNode) -> Reading | None:
    """The router whose choice ``top`` makes; ``None`` where it is spelled in no known way."""
    found = Reading()
    places = {node.arguments.get("index"): node for node in view.graph.users(top.id) if view.is_op(node, "getitem", 1)}
    if 1 not in places:
        return None
    found.nodes["experts"] = places[1]
    found.constants |= {
        "k": top.arguments.get("k"),
        "topk_dim": top.arguments.get("dim", -1),
        "sorted": top.arguments.get("sorted", True),
    }
    score = _choice(view, view.operand(top), found)
    if score is None or not _score(view, score, found):
        return None
    start = _start(view, places, score, found)
    if start is None or not _weights(view, start, top.module_path, found):
        return None
    return found


def _choice(view: View, pick: OpNode, found: Reading) -> OpNode | None:
    """From what is chosen by down to the score, noting groups and bias."""
    found.constants |= {"groups": 1, "groups_kept": 1, "group_score": "top2", "fill": "-inf", "bias": ""}
    found.constants["grouped"] = view.is_op(pick, "masked_fill", 2)
    if found.constants["grouped"]:
        mask, fill, pick = view.operand(pick, 1), pick.arguments.get("value"), view.operand(pick)
        if not _groups(view, mask, pick, found):
            return None
        found.constants["fill"] = fill if isinstance(fill, str) else _real(fill)
    if not view.is_op(pick, "add", 2):
        return pick
    for score, bias in view.both_orders(pick):
        leaf = view.through(bias, "cast", "reshape")
        if leaf.kind in ("buffer", "parameter") and leaf.output is not None:
            below = [bias.target if bias.kind == "op" else ""]
            if bias.kind == "op" and view.operand(bias) is not leaf:
                return None
            found.constants["bias"] = {"": "plain", "cast": "cast", "reshape": "row"}[below[0]]
            found.nodes["bias"] = leaf
            return score
    return None


def _groups(view: View, mask: OpNode, pick: OpNode, found: Reading) -> bool:
    """``~scatter(0, best groups, 1)`` spread over the members of each group."""
    for step in ("bitwise_not", "cast", "reshape", "expand", "reshape"):
        if not view.is_op(mask, step, 1):
            return False
        mask = view.operand(mask)
    if not view.is_op(mask, "scatter", 2) or not view.is_op(view.operand(mask, 1), "getitem", 1):
        return False
    best = view.operand(view.operand(mask, 1))
    if not view.is_op(best, "topk", 1):
        return False
    value = view.operand(best)
    twofold = view.is_op(value, "sum", 1)
    inner = view.operand(value) if twofold else value
    if not view.is_op(inner, "getitem", 1) or not view.operand(inner).inputs:
        return False
    chosen = view.operand(inner)
    members = view.operand(chosen)
    shape = members.output.shape if members.output else ()
    if len(shape) != 3 or chosen.target != ("topk" if twofold else "max") or view.operand(members) != pick:
        return False
    found.constants |= {
        "groups": shape[1],
        "groups_kept": best.arguments.get("k"),
        "group_score": "top2" if twofold else "max",
    }
    return not twofold or chosen.arguments.get("k") == 2


def _score(view: View, score: OpNode, found: Reading) -> bool:
    """From the score down to the product: activation, its format, and the casts around the product."""
    constants = found.constants
    constants["order"] = "scores-first" if score.target in SCORINGS and len(score.inputs) == 1 else "logits-first"
    if constants["order"] == "scores-first":
        if score.target == "softmax" and score.arguments != {"dim": [-1]}:
            return False
        constants["scoring"] = score.target
        wide = score.output.dtype if score.output else ""
        score = view.operand(score)
    else:
        wide = "float32"
    constants["widened"] = view.is_op(score, "cast", 1)
    logits = view.operand(score) if constants["widened"] else score
    if not view.is_op(logits, "linear") or logits.output is None:
        return False
    x, weight = view.operand(logits), view.operand(logits, 1)
    if len(logits.inputs) > 2:
        found.nodes["offset"] = view.operand(logits, 2)
        if found.nodes["offset"].kind != "parameter":
            return False
    constants["x_cast"], constants["w_cast"] = view.is_op(x, "cast", 1), view.is_op(weight, "cast", 1)
    x = view.operand(x) if constants["x_cast"] else x
    weight = view.operand(weight) if constants["w_cast"] else weight
    if weight.kind != "parameter" or x.output is None or len(x.output.shape) != 2:
        return False
    constants["score_dtype"] = wide
    constants["logits_dtype"] = logits.output.dtype
    found.nodes |= {"x": x, "weight": weight, "logits": logits, "scored": score}
    return True


def _start(view: View, places: dict[Any, OpNode], score: OpNode, found: Reading) -> OpNode | None:
    """The chosen scores: what the choice returns, or the scores gathered at the chosen places."""
    found.constants |= {"gathered": 0 not in places, "gather_dim": 1}
    if 0 in places:
        return places[0] if not found.constants["bias"] else None
    for node in view.graph.users(found.nodes["experts"].id):
        if view.is_op(node, "gather", 2) and view.operand(node) == score:
            found.constants["gather_dim"] = node.arguments.get("dim")
            return node
    return None


def _weights(view: View, node: OpNode, anchor: str, found: Reading) -> bool:
    """From the chosen scores up to the weights that leave the module, step by step."""
    constants = found.constants
    constants |= {"divided": False, "eps": 0.0, "least": 0.0, "scale": 1.0, "late_cast": False, "weights_cast": ""}
    if constants["order"] == "logits-first":
        later = _one(view, node, anchor, "cast")
        if later is not None:
            node, constants["late_cast"] = later, True
        after = _one(view, node, anchor, *SCORINGS)
        if after is None:
            return False
        constants["scoring"] = after.target
        constants["score_dtype"] = after.output.dtype if after.output else ""
        node = after
    divided = _one(view, node, anchor, "div")
    if divided is not None:
        if view.operand(divided) != node or len(divided.inputs) != 2 or not _divisor(view, divided, node, constants):
            return False
        node = divided
    scaled = _one(view, node, anchor, "mul")
    if scaled is not None and len(scaled.inputs) == 1 and isinstance(scaled.arguments.get("other"), (int, float)):
        constants["scale"], node = _real(scaled.arguments["other"]), scaled
    narrowed = _one(view, node, anchor, "cast")
    if narrowed is not None and narrowed.output is not None:
        constants["weights_cast"], node = narrowed.output.dtype, narrowed
    if node.output is None:
        return False
    constants["weights_dtype"] = node.output.dtype
    shared = constants["order"] == "logits-first" and constants["scoring"] == "softmax"
    constants["renormalise"] = constants["divided"] or shared
    found.nodes["weights"] = node
    return True


def _real(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _one(view: View, node: OpNode, anchor: str, *targets: str) -> OpNode | None:
    """The one reader of a value inside the module with one of the names."""
    found = [n for n in view.graph.users(node.id) if n.target in targets and n.module_path == anchor]
    return found[0] if len(found) == 1 else None


def _divisor(view: View, divided: OpNode, node: OpNode, constants: dict[str, Any]) -> bool:
    """``Σ + ε`` or ``max(Σ, least)`` over the chosen ones."""
    total = view.operand(divided, 1)
    if view.is_op(total, "add", 1) and isinstance(total.arguments.get("other"), float):
        constants["eps"], total = total.arguments["other"], view.operand(total)
    elif view.is_op(total, "clamp", 1) and set(total.arguments) == {"min"}:
        constants["least"], total = _real(total.arguments["min"]), view.operand(total)
    constants["divided"] = True
    same = view.is_op(total, "sum", 1) and view.operand(total) == node
    return same and total.arguments == {"dim": [-1], "keepdim": True}


def spell_router(values: Tensors, c: dict[str, Any]) -> Tensors:
    """The router as models spell it, from the constants of its reading."""
    x, weight = values["x"], values["weight"]
    x = x.to(torch.float32) if c["x_cast"] else x
    weight = weight.to(torch.float32) if c["w_cast"] else weight
    logits = F.linear(x, weight, values.get("offset"))
    score = logits.to(torch.float32) if c["widened"] else logits
    if c["order"] == "scores-first":
        score = _activate(score, c["scoring"])
    pick = score + _bias(values["bias"], c["bias"]) if c["bias"] else score
    if c["grouped"]:
        pick = pick.masked_fill(~_standing(pick, c), float(c["fill"]))
    best = torch.topk(pick, c["k"], dim=c["topk_dim"], sorted=c["sorted"])
    ids = best.indices
    weights = score.gather(c["gather_dim"], ids) if c["gathered"] else best.values
    if c["order"] == "logits-first":
        weights = weights.to(torch.float32) if c["late_cast"] else weights
        weights = _activate(weights, c["scoring"])
    if c["divided"]:
        total = weights.sum(dim=-1, keepdim=True)
        total = total + c["eps"] if c["eps"] else total
        weights = weights / (total.clamp(min=c["least"]) if c["least"] else total)
    if c["scale"] != 1.0:
        weights = weights * c["scale"]
    if c["weights_cast"]:
        weights = weights.to(getattr(torch, c["weights_cast"]))
    return {"weights": weights, "experts": ids}


def _activate(value: Tensor, scoring: str) -> Tensor:
    return value.softmax(dim=-1) if scoring == "softmax" else value.sigmoid()


def _bias(bias: Tensor, how: str) -> Tensor:
    if how == "cast":
        return bias.to(torch.float32)
    return bias.reshape(-1) if how == "row" else bias


def _standing(pick: Tensor, c: dict[str, Any]) -> Tensor:
    """``[T, E]``, true in the groups that stand."""
    rows, experts = pick.shape
    members = pick.view(rows, c["groups"], experts // c["groups"])
    value = members.topk(2, dim=-1).values.sum(dim=-1) if c["group_score"] == "top2" else members.max(dim=-1).values
    best = torch.topk(value, k=c["groups_kept"], dim=-1, sorted=False).indices
    mask = torch.zeros_like(value).scatter(1, best, 1)
    return mask.unsqueeze(-1).expand(members.shape).reshape(rows, experts).bool()


def score_of(logits: Tensor, scoring: str) -> Tensor:
    """Softmax by log-sum-exp, sigmoid by the hyperbolic tangent."""
    if scoring == "sigmoid":
        return (1 + torch.tanh(logits / 2)) / 2
    return torch.exp(logits - torch.logsumexp(logits, dim=-1, keepdim=True))


def best_of(values: Tensor, count: int) -> Tensor:
    """True where fewer than ``count`` of a row's values are larger."""
    return (values.unsqueeze(-2) > values.unsqueeze(-1)).sum(-1) < count


def dense_router(values: Tensors, c: dict[str, Any]) -> Tensor:
    """Weights as a matrix ``[T, E]``, chosen by counting, without an order among the chosen."""
    logits = torch.einsum("th,eh->te", values["x"], values["weight"])
    logits = logits + values["offset"] if "offset" in values else logits
    score = score_of(logits, c["scoring"])
    pick = (logits if c["order"] == "logits-first" else score).detach()
    pick = pick + values["bias"].reshape(-1) if c["bias"] else pick
    if c["groups_kept"] < c["groups"]:
        members = pick.reshape(pick.shape[0], c["groups"], -1)
        width = 2 if c["group_score"] == "top2" else 1
        value = members.sort(-1, descending=True).values[..., :width].sum(-1)
        standing = best_of(value, c["groups_kept"]).repeat_interleave(members.shape[-1], dim=1)
        pick = torch.where(standing, pick, torch.full_like(pick, -math.inf))
    chosen = best_of(pick, c["k"]).to(score.dtype)
    kept = score * chosen
    total = (kept.sum(-1, keepdim=True) + c["eps"]).clamp(min=c["least"])
    return kept / total * c["scale"] if c["renormalise"] else kept * c["scale"]
