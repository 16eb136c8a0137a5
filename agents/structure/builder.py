"""Draft nodes of a canonical graph: emitted by spelling rules, shared where equal."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from shardwright.schemas.graph import TensorSpec

COMMUTATIVE = frozenset(
    {"add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or", "bitwise_and", "bitwise_or"}
)


@dataclass(frozen=True)
class Ref:
    """A value of the draft graph."""

    index: int


@dataclass
class Draft:
    """One node before ordering."""

    kind: Literal["input", "parameter", "buffer", "op"]
    target: str
    inputs: tuple[int, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    spec: TensorSpec | None = None
    module_path: str = ""
    module_class: str = ""
    source: str = ""


@dataclass(frozen=True)
class Place:
    """Where a node comes from: module path, class, source line."""

    module_path: str = ""
    module_class: str = ""
    source: str = ""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spec_of(value: Any) -> TensorSpec | None:
    """Sizes, dtype and strides of a traced value; ``None`` for anything that is not one tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    return TensorSpec(
        shape=tuple(int(s) for s in value.shape),
        dtype=dtype_name(value.dtype),
        stride=tuple(int(s) for s in value.stride()),
    )


class Builder:
    """Collects draft nodes; two calls with equal operator, operands and constants give one node."""

    def __init__(self) -> None:
        self.drafts: list[Draft] = []
        self._known: dict[str, int] = {}
        self.place = Place()

    def leaf(self, kind: Literal["input", "parameter", "buffer"], name: str, spec: TensorSpec | None) -> Ref:
        self.drafts.append(Draft(kind, name, spec=spec))
        return Ref(len(self.drafts) - 1)

    def emit(self, target: str, inputs: list[Ref], arguments: dict[str, Any], spec: TensorSpec | None) -> Ref:
        """Add an operation or find its equal."""
        indices = [ref.index for ref in inputs]
        ordered = sorted(indices) if target in COMMUTATIVE else indices
        size = [list(spec.shape), spec.dtype] if spec else None
        key = json.dumps([target, ordered, arguments, size], sort_keys=True, default=str)
        if key not in self._known:
            self._known[key] = len(self.drafts)
            place = self.place
            self.drafts.append(
                Draft(
                    "op",
                    target,
                    tuple(indices),
                    arguments,
                    spec,
                    place.module_path,
                    place.module_class,
                    place.source,
                )
            )
        return Ref(self._known[key])

    def at(self, ref: Ref) -> Draft:
        return self.drafts[ref.index]

    def spec(self, ref: Ref) -> TensorSpec:
        spec = self.drafts[ref.index].spec
        assert spec is not None, "a value without a tensor spec was used as a tensor"
        return spec

    def is_op(self, ref: Any, target: str) -> bool:
        return isinstance(ref, Ref) and self.at(ref).kind == "op" and self.at(ref).target == target

    def operand(self, ref: Ref, position: int = 0) -> Ref:
        return Ref(self.at(ref).inputs[position])


@dataclass(frozen=True)
class Call:
    """One traced call with operands bound to schema names; constants at their default are left out."""

    name: str
    """Functional operator name without overload: ``add_`` reads ``add``."""
    values: dict[str, Any]
    node: fx.Node
    spec: TensorSpec | None

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    @property
    def first(self) -> Ref:
        """The first operand."""
        value = next(iter(self.values.values()))
        assert isinstance(value, Ref)
        return value
