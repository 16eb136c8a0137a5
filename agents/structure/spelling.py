"""One spelling for each operation: views, casts, matrix products, squares, SiLU, slices.

A rule gets a bound call and returns the canonical value. Operations without a rule keep their name, their operands in
schema order and their constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardwright.agents.structure.builder import Builder, Call, Ref, dtype_name
from shardwright.schemas.graph import TensorSpec

Rule = Callable[[Builder, Call], Any]

_EXACT_INSIDE = {"bfloat16": {"float32", "float64"}, "float16": {"float32", "float64"}, "float32": {"float64"}}
"""dtype → wider dtypes that hold all its values exactly, so that there and back is the identity."""


def normal(dim: int, rank: int) -> int:
    """A dimension counted from the end, so that it does not depend on leading dimensions."""
    return dim - rank if dim >= 0 else dim


def cast(builder: Builder, value: Ref, dtype: str, spec: TensorSpec) -> Ref:
    """A change of dtype; none where the dtype stays, and widening then narrowing back is the value itself."""
    source = builder.spec(value)
    if source.dtype == dtype:
        return value
    if builder.is_op(value, "cast"):
        origin = builder.operand(value)
        if builder.spec(origin).dtype == dtype and source.dtype in _EXACT_INSIDE.get(dtype, set()):
            return origin
    return builder.emit("cast", [value], {"dtype": dtype}, spec.model_copy(update={"dtype": dtype}))


def _identity(builder: Builder, call: Call) -> Any:
    return call.first


def _to(builder: Builder, call: Call) -> Any:
    assert call.spec is not None
    return cast(builder, call.first, call.spec.dtype, call.spec)


def _reshape(builder: Builder, call: Call) -> Any:
    assert call.spec is not None
    return reshape(builder, call.first, call.spec)


def reshape(builder: Builder, value: Ref, spec: TensorSpec) -> Ref:
    while builder.is_op(value, "reshape"):
        value = builder.operand(value)
    if builder.spec(value).shape == spec.shape:
        return value
    return builder.emit("reshape", [value], {"shape": list(spec.shape)}, spec)


def _expand(builder: Builder, call: Call) -> Any:
    assert call.spec is not None
    if builder.spec(call.first).shape == call.spec.shape:
        return call.first
    return builder.emit("expand", [call.first], {"shape": list(call.spec.shape)}, call.spec)


def _permute(builder: Builder, call: Call) -> Any:
    assert call.spec is not None
    rank = len(call.spec.shape)
    if call.name == "permute":
        dims = [d % rank for d in call.get("dims")]
    elif call.name == "numpy_T":
        dims = list(reversed(range(rank)))
    else:
        dims = list(range(rank))
        given = (call.get("dim0", 0), call.get("dim1", 0))
        if rank > 1:
            one, other = (d % rank for d in {"t": (0, 1), "mT": (-2, -1)}.get(call.name, given))
            dims[one], dims[other] = dims[other], dims[one]
    value = call.first
    if builder.is_op(value, "permute"):
        inner = [d + rank for d in builder.at(value).arguments["dims"]]
        dims, value = [inner[d] for d in dims], builder.operand(value)
    if dims == list(range(rank)):
        return value
    return builder.emit("permute", [value], {"dims": [d - rank for d in dims]}, call.spec)


def piece(builder: Builder, value: Ref, dim: int, start: int, stop: int, spec: TensorSpec | None) -> Ref:
    """A contiguous range of one dimension."""
    source = builder.spec(value)
    size = source.shape[dim]
    if (start, stop) == (0, size):
        return value
    shape = list(source.shape)
    shape[dim] = stop - start
    out = spec or TensorSpec(shape=tuple(shape), dtype=source.dtype, stride=source.stride)
    arguments = {"dim": normal(dim, len(shape)), "start": start, "stop": stop}
    return builder.emit("slice", [value], arguments, out)


def _slice(builder: Builder, call: Call) -> Any:
    source = builder.spec(call.first)
    dim = call.get("dim", 0) % len(source.shape)
    size = source.shape[dim]
    start, stop = call.get("start") or 0, call.get("end")
    start = max(0, start + size if start < 0 else start)
    stop = size if stop is None else min(size, stop + size if stop < 0 else stop)
    if call.get("step", 1) != 1:
        arguments = {"dim": normal(dim, len(source.shape)), "start": start, "stop": stop, "step": call.get("step")}
        return builder.emit("slice", [call.first], arguments, call.spec)
    return piece(builder, call.first, dim, min(start, size), max(start, stop), call.spec)


def _split(builder: Builder, call: Call) -> Any:
    """``chunk``, ``split`` and ``split_with_sizes`` as slices, one for each piece."""
    source = builder.spec(call.first)
    dim = call.get("dim", 0) % len(source.shape)
    pieces, start = [], 0
    for value in call.node.meta["val"]:
        width = int(value.shape[dim])
        pieces.append(piece(builder, call.first, dim, start, start + width, None))
        start += width
    return tuple(pieces)


def linear(builder: Builder, value: Ref, weight: Ref, bias: Ref | None, spec: TensorSpec | None) -> Ref:
    inputs = [value, weight] if bias is None else [value, weight, bias]
    return builder.emit("linear", inputs, {}, spec)


def _linear(builder: Builder, call: Call) -> Any:
    return linear(builder, call.get("input"), call.get("weight"), call.get("bias"), call.spec)


def _matmul(builder: Builder, call: Call) -> Any:
    """A product with a transposed 2-D right operand is a linear."""
    value, weight = call.first, call.get("other", call.get("mat2"))
    if len(builder.spec(weight).shape) == 2 and builder.is_op(weight, "permute"):
        return linear(builder, value, builder.operand(weight), None, call.spec)
    return builder.emit("matmul", [value, weight], {}, call.spec)


def _addmm(builder: Builder, call: Call) -> Any:
    weight = call.get("mat2")
    if builder.is_op(weight, "permute") and call.get("beta", 1) == 1 and call.get("alpha", 1) == 1:
        return linear(builder, call.get("mat1"), builder.operand(weight), call.get("self"), call.spec)
    return generic(builder, call)


def _mul(builder: Builder, call: Call) -> Any:
    one, other = call.first, call.get("other")
    if not isinstance(other, Ref):
        same = call.spec is not None and call.spec.dtype == builder.spec(one).dtype
        return one if other == 1 and same else builder.emit("mul", [one], {"other": other}, call.spec)
    if one == other:
        return builder.emit("pow", [one], {"exponent": 2}, call.spec)
    for gate, sigmoid in ((one, other), (other, one)):
        if builder.is_op(sigmoid, "sigmoid") and builder.operand(sigmoid) == gate:
            return builder.emit("silu", [gate], {}, call.spec)
    return builder.emit("mul", [one, other], {}, call.spec)


def _add(builder: Builder, call: Call) -> Any:
    one, other = call.first, call.get("other")
    arguments = {"alpha": call.get("alpha")} if call.get("alpha", 1) != 1 else {}
    if not isinstance(other, Ref):
        return one if other == 0 else builder.emit("add", [one], {"other": other, **arguments}, call.spec)
    target = "add" if not arguments else "add_scaled"
    return builder.emit(target, [one, other], arguments, call.spec)


def _pow(builder: Builder, call: Call) -> Any:
    exponent = call.get("exponent")
    if call.name == "square":
        exponent = 2
    if exponent == -0.5:
        return builder.emit("rsqrt", [call.first], {}, call.spec)
    if isinstance(exponent, Ref):
        return builder.emit("pow", [call.first, exponent], {}, call.spec)
    value = int(exponent) if float(exponent).is_integer() else exponent
    return builder.emit("pow", [call.first], {"exponent": value}, call.spec)


def _reciprocal(builder: Builder, call: Call) -> Any:
    if builder.is_op(call.first, "sqrt"):
        return builder.emit("rsqrt", [builder.operand(call.first)], {}, call.spec)
    return builder.emit("reciprocal", [call.first], {}, call.spec)


def _reduce(builder: Builder, call: Call) -> Any:
    """Reductions and softmax: dimensions from the end, a dtype argument as a cast before."""
    value = call.first
    source = builder.spec(value)
    if call.get("dtype") is not None:
        value = cast(builder, value, dtype_name(call.get("dtype")), source)
    dims = call.get("dim")
    dims = list(range(len(source.shape))) if dims is None else ([dims] if isinstance(dims, int) else dims)
    arguments: dict[str, Any] = {"dim": sorted(normal(d, len(source.shape)) for d in dims)}
    if call.get("keepdim"):
        arguments["keepdim"] = True
    return builder.emit(call.name.lstrip("_"), [value], arguments, call.spec)


def _dropout(builder: Builder, call: Call) -> Any:
    active = call.get("train", call.get("training", True)) and call.get("p", 0) != 0
    return generic(builder, call) if active else call.first


def plain_constant(value: Any) -> Any:
    """A constant of a call as JSON; devices, layouts and memory formats say nothing about values."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain_constant(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def generic(builder: Builder, call: Call) -> Any:
    """Any other operation: operands in schema order, with their slots where these are not the leading ones."""
    inputs: list[Ref] = []
    slots: list[str] = []
    constants: dict[str, Any] = {}
    for name, value in call.values.items():
        if isinstance(value, Ref):
            inputs.append(value)
            slots.append(name)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, Ref) for v in value):
            for i, item in enumerate(value):
                if isinstance(item, Ref):
                    inputs.append(item)
                    slots.append(f"{name}[{i}]")
        elif name not in ("device", "layout", "pin_memory", "memory_format", "non_blocking"):
            constants[name] = plain_constant(value)
    if slots and slots[1:] not in ([], ["other"]):
        constants["operands"] = slots
    return builder.emit(call.name, inputs, constants, call.spec)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("alias", "detach", "contiguous", "clone", "lift_fresh_copy", "lift_fresh"), _identity),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _to),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten"), _reshape),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    **dict.fromkeys(("permute", "transpose", "t", "numpy_T", "mT", "swapaxes"), _permute),
    **dict.fromkeys(("chunk", "split", "split_with_sizes"), _split),
    **dict.fromkeys(("matmul", "mm"), _matmul),
    **dict.fromkeys(("pow", "square"), _pow),
    **dict.fromkeys(("mean", "sum", "softmax", "_softmax", "amax", "amin", "log_softmax"), _reduce),
    **dict.fromkeys(("dropout", "native_dropout", "feature_dropout"), _dropout),
    "slice": _slice,
    "linear": _linear,
    "addmm": _addmm,
    "mul": _mul,
    "add": _add,
    "reciprocal": _reciprocal,
}
"""Operator name → rule."""
