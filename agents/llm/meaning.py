"""What each fusible canonical operation means, as plain torch on fp64: the second formula for a proposed region.

The region's traced nodes are the first one. This reads the canonical graph instead: operands, constants and nothing
else of the trace. An operation that is not in the table is never part of a proposed region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwright.agents.structure.interpret import Sizes
from shardwright.schemas.graph import OpNode

Tensor = torch.Tensor
Meaning = Callable[[list[Tensor], dict[str, Any], Sizes], Tensor]
_INTEGERS = {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool}


def _two(function: Callable[..., Tensor], name: str = "other") -> Meaning:
    """An operation of two operands, of which the second may be a constant."""

    def call(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
        return function(values[0], values[1] if len(values) > 1 else arguments[name])

    return call


def _one(function: Callable[[Tensor], Tensor]) -> Meaning:
    def call(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
        return function(values[0])

    return call


def _reduction(function: Callable[..., Tensor]) -> Meaning:
    def call(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
        return function(values[0], dim=arguments["dim"], keepdim=bool(arguments.get("keepdim")))

    return call


def _along(function: Callable[..., Tensor]) -> Meaning:
    def call(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
        (dim,) = arguments["dim"]
        return function(values[0], dim=dim)

    return call


def _cast(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    return values[0].to(_INTEGERS.get(arguments["dtype"], torch.float64))


def _reshape(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    return values[0].reshape(sizes.shape(tuple(arguments["shape"])))


def _expand(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    return values[0].expand(sizes.shape(tuple(arguments["shape"])))


def _permute(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    return values[0].permute(arguments["dims"])


def _slice(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    dim, start, stop = arguments["dim"], sizes.of(arguments["start"]), sizes.of(arguments["stop"])
    index = torch.arange(start, stop, arguments.get("step", 1))
    return values[0].index_select(dim, index)


def _cat(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    return torch.cat(values, arguments.get("dim", 0))


def _add_scaled(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    return values[0] + arguments["alpha"] * values[1]


def _sub(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    other = values[1] if len(values) > 1 else arguments["other"]
    return values[0] - arguments.get("alpha", 1) * other


def _where(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    condition, yes, no = values
    return torch.where(condition, yes, no)


def _max(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Any:
    if "dim" not in arguments:
        return torch.max(*values)
    return torch.max(values[0], arguments["dim"], keepdim=bool(arguments.get("keepdim")))


def _getitem(values: list[Any], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    picked: Tensor = values[0][arguments["index"]]
    return picked


def _clamp(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    return values[0].clamp(arguments.get("min"), arguments.get("max"))


def _softplus(values: list[Tensor], arguments: dict[str, Any], sizes: Sizes) -> Tensor:
    return F.softplus(values[0], arguments.get("beta", 1), arguments.get("threshold", 20))


MEANINGS: dict[str, Meaning] = {
    "add": _two(torch.add),
    "mul": _two(torch.mul),
    "div": _two(torch.div),
    "sub": _sub,
    "add_scaled": _add_scaled,
    "pow": _two(torch.pow, "exponent"),
    "maximum": _two(torch.maximum),
    "minimum": _two(torch.minimum),
    "neg": _one(torch.neg),
    "exp": _one(torch.exp),
    "log": _one(torch.log),
    "sqrt": _one(torch.sqrt),
    "rsqrt": _one(lambda x: x.pow(-0.5)),
    "reciprocal": _one(lambda x: 1 / x),
    "abs": _one(torch.abs),
    "sigmoid": _one(lambda x: (1 + torch.tanh(x / 2)) / 2),
    "silu": _one(lambda x: x * (1 + torch.tanh(x / 2)) / 2),
    "tanh": _one(torch.tanh),
    "relu": _one(lambda x: x.clamp(min=0)),
    "softplus": _softplus,
    "clamp": _clamp,
    "sin": _one(torch.sin),
    "cos": _one(torch.cos),
    "sum": _reduction(torch.sum),
    "mean": _reduction(torch.mean),
    "amax": _reduction(torch.amax),
    "amin": _reduction(torch.amin),
    "softmax": _along(torch.softmax),
    "log_softmax": _along(torch.log_softmax),
    "cast": _cast,
    "reshape": _reshape,
    "expand": _expand,
    "permute": _permute,
    "slice": _slice,
    "cat": _cat,
    "where": _where,
    "max": _max,
    "getitem": _getitem,
}
"""Canonical operator → its meaning."""

TUPLES = frozenset({"max"})
"""Operators that may give several values, each read by a ``getitem``."""


def evaluate(nodes: tuple[OpNode, ...], known: dict[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
    """Run canonical nodes, each after its operands.

    Args:
        nodes: any order.
        known: canonical id → value, for everything read from outside.

    Raises:
        KeyError: an operand is neither known nor among the nodes.
    """
    values, waiting = dict(known), {node.id: node for node in nodes}
    while waiting:
        ready = [n for n in waiting.values() if all(i in values for i in n.inputs)]
        if not ready:
            raise KeyError(f"operands of {sorted(waiting)[0]} are not known")
        for node in ready:
            arguments = {k: v for k, v in node.arguments.items() if k != "operands"}
            values[node.id] = MEANINGS[node.target]([values[i] for i in node.inputs], arguments, sizes)
            del waiting[node.id]
    return values
