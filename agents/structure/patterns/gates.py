"""Gate functions of MLPs and experts: what stands between the up projection and the down projection.

``y = g(gate) · u(up)``, or ``y = g(up)`` where there is no gate. Each form is spelled once as models spell it and once
by an independent formula. λ, β are soft caps, L a clamp, α a slope.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from shardwright.agents.structure.patterns.base import View
from shardwright.schemas.graph import OpNode

Constants = dict[str, Any]
GateFunction = Callable[[torch.Tensor, torch.Tensor, Constants], torch.Tensor]


@dataclass(frozen=True)
class Found:
    """A gate in a canonical graph: its form, its constants, and the values it reads."""

    form: str
    constants: Constants
    gate: OpNode
    up: OpNode
    """The same node as ``gate`` in forms without a gate."""


@dataclass(frozen=True)
class Gate:
    """One form."""

    title: str
    reference: GateFunction
    oracle: GateFunction
    gated: bool = True


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """σ(x) by the hyperbolic tangent."""
    return (1 + torch.tanh(x / 2)) / 2


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


def _soft(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap · tanh(x / cap) as e/(e + 2) with e = exp(2x / cap) − 1; from 19 on the tangent is 1 in fp64."""
    grown = torch.expm1(2 * (x / cap).clamp(-19.0, 19.0))
    return cap * grown / (grown + 2)


def _below(x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.where(x > limit, torch.full_like(x, limit), x)


def _within(x: torch.Tensor, limit: float) -> torch.Tensor:
    return -_below(-_below(x, limit), limit)


def _wide_silu(gate: torch.Tensor, up: torch.Tensor, c: Constants) -> torch.Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def _clamped(gate: torch.Tensor, up: torch.Tensor, c: Constants) -> torch.Tensor:
    return F.silu(gate.clamp(max=c["limit"])) * up.clamp(min=-c["limit"], max=c["limit"])


def _clamped_after(gate: torch.Tensor, up: torch.Tensor, c: Constants) -> torch.Tensor:
    return F.silu(gate).clamp(max=c["limit"]) * up.clamp(min=-c["limit"], max=c["limit"])


def _sloped(gate: torch.Tensor, up: torch.Tensor, c: Constants) -> torch.Tensor:
    gate, up = gate.clamp(max=c["limit"]), up.clamp(min=-c["limit"], max=c["limit"])
    return (up + 1) * (gate * torch.sigmoid(gate * c["alpha"]))


def _soft_capped(gate: torch.Tensor, up: torch.Tensor, c: Constants) -> torch.Tensor:
    wide, other = gate.float(), up.float()
    left = torch.tanh(wide / c["beta"]) * c["beta"] * torch.sigmoid(wide)
    return (left * (torch.tanh(other / c["lambda"]) * c["lambda"])).to(gate.dtype)


GATES: dict[str, Gate] = {
    "silu": Gate("SwiGLU", lambda g, u, c: F.silu(g) * u, lambda g, u, c: u * g * _sigmoid(g)),
    "silu-wide": Gate("SwiGLU in fp32", _wide_silu, lambda g, u, c: u * g * _sigmoid(g)),
    "silu-clamped": Gate(
        "clamped SwiGLU",
        _clamped,
        lambda g, u, c: _below(g, c["limit"]) * _sigmoid(_below(g, c["limit"])) * _within(u, c["limit"]),
    ),
    "silu-clamped-after": Gate(
        "SwiGLU clamped after the activation",
        _clamped_after,
        lambda g, u, c: _below(g * _sigmoid(g), c["limit"]) * _within(u, c["limit"]),
    ),
    "swiglu-sloped": Gate(
        "clamped SwiGLU with slope",
        _sloped,
        lambda g, u, c: (
            (1 + _within(u, c["limit"])) * _below(g, c["limit"]) * _sigmoid(c["alpha"] * _below(g, c["limit"]))
        ),
    ),
    "situ": Gate("SiTU", _soft_capped, lambda g, u, c: _soft(g, c["beta"]) * _sigmoid(g) * _soft(u, c["lambda"])),
    "gelu-tanh": Gate("GeGLU", lambda g, u, c: F.gelu(g, approximate="tanh") * u, lambda g, u, c: u * _gelu_tanh(g)),
    "gelu": Gate("GeGLU (exact)", lambda g, u, c: F.gelu(g) * u, lambda g, u, c: u * g * torch.special.ndtr(g)),
    "relu": Gate("ReLU", lambda g, u, c: F.relu(g), lambda g, u, c: g * (g > 0), gated=False),
    "relu2": Gate(
        "ReLU²", lambda g, u, c: torch.square(F.relu(g)), lambda g, u, c: (g * g + g * g.abs()) / 2, gated=False
    ),
}
"""Form → how it is spelled and what it means."""


def find_gates(view: View, node: OpNode) -> Iterator[Found]:
    """Every form that may end at ``node``; which one is right the re-trace decides."""
    for read in (_product_forms, _sloped_forms, _soft_forms, _plain_forms):
        yield from read(view, node)


def _limit(node: OpNode, *, both: bool) -> float | None:
    """L of ``clamp(max=L)`` or, with ``both``, of ``clamp(-L, L)``."""
    high, low = node.arguments.get("max"), node.arguments.get("min")
    if isinstance(high, str):
        high = float(high)
    if isinstance(low, str):
        low = float(low)
    if not isinstance(high, (int, float)) or (both and low != -high) or (not both and low is not None):
        return None
    return float(high) if math.isfinite(high) else None


def _product_forms(view: View, node: OpNode) -> Iterator[Found]:
    wide = view.is_op(node, "cast")
    product = view.operand(node) if wide else node
    if not view.is_op(product, "mul", 2):
        return
    for left, right in view.both_orders(product):
        if view.is_op(left, "gelu", 1):
            form = "gelu-tanh" if left.arguments.get("approximate") == "tanh" else "gelu"
            if not wide:
                yield Found(form, {}, view.operand(left), right)
        elif view.is_op(left, "silu", 1):
            inner = view.operand(left)
            if wide and view.is_op(inner, "cast") and view.is_op(right, "cast"):
                yield Found("silu-wide", {}, view.operand(inner), view.operand(right))
            elif not wide and view.is_op(inner, "clamp", 1) and view.is_op(right, "clamp", 1):
                limit = _limit(inner, both=False)
                if limit is not None and _limit(right, both=True) == limit:
                    yield Found("silu-clamped", {"limit": limit}, view.operand(inner), view.operand(right))
            elif not wide:
                yield Found("silu", {}, inner, right)
        elif view.is_op(left, "clamp", 1) and view.is_op(view.operand(left), "silu", 1) and not wide:
            limit = _limit(left, both=False)
            if limit is not None and view.is_op(right, "clamp", 1) and _limit(right, both=True) == limit:
                gate = view.operand(view.operand(left))
                yield Found("silu-clamped-after", {"limit": limit}, gate, view.operand(right))


def _sloped_forms(view: View, node: OpNode) -> Iterator[Found]:
    """``(clamp(up) + 1) · (clamp(gate) · σ(α · clamp(gate)))``."""
    if not view.is_op(node, "mul", 2):
        return
    for shifted, glu in view.both_orders(node):
        if not (view.is_op(shifted, "add", 1) and shifted.arguments.get("other") == 1 and view.is_op(glu, "mul", 2)):
            continue
        for gate, slope in view.both_orders(glu):
            if not view.is_op(slope, "sigmoid", 1) or not view.is_op(view.operand(slope), "mul", 1):
                continue
            scaled, up = view.operand(slope), view.operand(shifted)
            if view.operand(scaled) != gate or not view.is_op(gate, "clamp", 1) or not view.is_op(up, "clamp", 1):
                continue
            limit, alpha = _limit(gate, both=False), scaled.arguments.get("other")
            if limit is None or _limit(up, both=True) != limit or not isinstance(alpha, float):
                continue
            yield Found("swiglu-sloped", {"limit": limit, "alpha": alpha}, view.operand(gate), view.operand(up))


def _cap(view: View, node: OpNode) -> tuple[OpNode, float] | None:
    """``cap · tanh(x / cap)`` → (x, cap)."""
    if not view.is_op(node, "mul", 1) or not view.is_op(view.operand(node), "tanh", 1):
        return None
    ratio, cap = view.operand(view.operand(node)), node.arguments.get("other")
    if not view.is_op(ratio, "div", 1) or ratio.arguments.get("other") != cap or not isinstance(cap, (int, float)):
        return None
    return view.operand(ratio), cap


def _soft_forms(view: View, node: OpNode) -> Iterator[Found]:
    """``[β tanh(g/β) σ(g)] · [λ tanh(u/λ)]`` in fp32."""
    product = view.operand(node) if view.is_op(node, "cast") else None
    if product is None or not view.is_op(product, "mul", 2):
        return
    for left, right in view.both_orders(product):
        up = _cap(view, right)
        if up is None or not view.is_op(left, "mul", 2):
            continue
        for capped, sigmoid in view.both_orders(left):
            gate = _cap(view, capped)
            if gate is None or not view.is_op(sigmoid, "sigmoid", 1) or view.operand(sigmoid) != gate[0]:
                continue
            if view.is_op(gate[0], "cast") and view.is_op(up[0], "cast"):
                constants = {"beta": gate[1], "lambda": up[1]}
                yield Found("situ", constants, view.operand(gate[0]), view.operand(up[0]))


def _plain_forms(view: View, node: OpNode) -> Iterator[Found]:
    if view.is_op(node, "relu", 1):
        yield Found("relu", {}, view.operand(node), view.operand(node))
    if view.is_op(node, "pow", 1) and node.arguments.get("exponent") == 2:
        inner = view.operand(node)
        if view.is_op(inner, "relu", 1):
            yield Found("relu2", {}, view.operand(inner), view.operand(inner))
