"""Canonical form: the same for two spellings, different for two functions; equal values on real tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.builder import Draft
from shardwright.agents.structure.ordering import canonical_order
from shardwright.agents.structure.testkit import captured_example, meta
from shardwright.schemas.graph import TensorSpec

Function = Callable[[torch.Tensor], torch.Tensor]


def nodes_of(function: Function, dtype: torch.dtype = torch.bfloat16):  # type: ignore[no-untyped-def]
    class Call(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    return captured_example(lambda: (Call(), (meta(4, 6, 8, dtype=dtype),)))[1]


SAME: dict[str, tuple[Function, Function]] = {
    "method-or-function": (lambda x: x.add(1.0).mul(x), lambda x: torch.mul(torch.add(x, 1.0), x)),
    "operand-order": (lambda x: x.sin() + x.cos(), lambda x: x.cos() + x.sin()),
    "square": (lambda x: x.pow(2), lambda x: x * x),
    "square-function": (lambda x: torch.square(x), lambda x: x**2.0),
    "silu": (F.silu, lambda x: x * torch.sigmoid(x)),
    "rsqrt": (torch.rsqrt, lambda x: torch.reciprocal(torch.sqrt(x))),
    "rsqrt-power": (torch.rsqrt, lambda x: x.pow(-0.5)),
    "casts": (lambda x: x.float(), lambda x: x.to(torch.float32).type(torch.float32)),
    "cast-there-and-back": (lambda x: x.sin(), lambda x: x.float().to(torch.bfloat16).sin()),
    "views": (lambda x: x.view(24, 8), lambda x: x.unsqueeze(0).flatten(0, 2)),
    "transposes": (lambda x: x.transpose(0, 2), lambda x: x.permute(2, 1, 0)),
    "transpose-by-attribute": (lambda x: x.mT, lambda x: x.transpose(-1, -2)),
    "matrix-transpose-by-attribute": (lambda x: x.flatten(1).T, lambda x: x.flatten(1).transpose(0, 1)),
    "double-transpose": (lambda x: x.sin(), lambda x: x.transpose(0, 1).transpose(1, 0).sin()),
    "chunk-or-slice": (lambda x: x.chunk(2, -1)[1], lambda x: x[..., 4:]),
    "split-or-narrow": (lambda x: x.split([2, 6], dim=-1)[0], lambda x: x[:, :, :2]),
    "negative-dim": (lambda x: x.mean(2, keepdim=True), lambda x: x.mean(-1, keepdim=True)),
    "copies": (lambda x: x.sin(), lambda x: x.clone().contiguous().detach().sin()),
    "no-dropout": (lambda x: x.sin(), lambda x: F.dropout(x, 0.0).sin()),
    "in-place": (lambda x: x.sin() + 1.0, lambda x: x.sin().add_(1.0)),
    "repeated": (lambda x: x.sin() + x.sin().cos(), lambda x: (s := x.sin()) + s.cos()),
    "softmax-dtype": (lambda x: x.softmax(-1, dtype=torch.float32), lambda x: x.float().softmax(-1)),
}

DIFFERENT: dict[str, tuple[Function, Function]] = {
    "constant": (lambda x: x + 1.0, lambda x: x + 2.0),
    "alpha": (lambda x: torch.add(x, x.sin(), alpha=1), lambda x: torch.add(x, x.sin(), alpha=2)),
    "rounding": (lambda x: x.float().sin().to(torch.bfloat16), lambda x: x.sin()),
    "narrow-and-back": (lambda x: x.float().sin(), lambda x: x.float().sin().bfloat16().float()),
    "half": (lambda x: x.to(torch.float16).to(torch.bfloat16), lambda x: x),
    "dimension": (lambda x: x.softmax(-1), lambda x: x.softmax(-2)),
    "subtraction-order": (lambda x: x.sin() - x.cos(), lambda x: x.cos() - x.sin()),
    "slice-start": (lambda x: x[..., :4], lambda x: x[..., 1:5]),
    "view-or-transpose": (lambda x: x.view(6, 4, 8), lambda x: x.transpose(0, 1)),
    "dropout": (lambda x: F.dropout(x, 0.1), lambda x: F.dropout(x, 0.2)),
    "in-place-before-reading": (lambda x: (y := x.sin()).mul(2.0) + y, lambda x: (y := x.sin()).mul_(2.0) + y),
}


@pytest.mark.parametrize("name", sorted(SAME))
def test_spellings_of_one_function_are_equal(name: str) -> None:
    one, other = (nodes_of(function) for function in SAME[name])
    assert one.digest == other.digest, f"{one.nodes}\n{other.nodes}"


@pytest.mark.parametrize("name", sorted(DIFFERENT))
def test_different_functions_are_apart(name: str) -> None:
    one, other = (nodes_of(function) for function in DIFFERENT[name])
    assert one.digest != other.digest


def test_a_view_read_after_a_write_is_stale() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        rows = y.view(24, 8)
        y.mul_(2.0)
        return rows.cos()

    assert "stale" in [node.target for node in nodes_of(function).nodes]


@given(st.permutations(list(range(6))), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_order_does_not_depend_on_the_trace(order: list[int], random) -> None:  # type: ignore[no-untyped-def]
    """Any topological order of the same graph, with operands of sums exchanged, gives the same canonical nodes."""
    spec = TensorSpec(shape=(2,), dtype="float32")
    names = ["a", "b", "c", "d", "e", "f"]
    leaves = [Draft("input", names[i], spec=spec, arguments={}) for i in order]
    at = {leaf.target: position for position, leaf in enumerate(leaves)}
    drafts = list(leaves)

    def emit(target: str, *inputs: int) -> int:
        drafts.append(Draft("op", target, tuple(inputs), spec=spec))
        return len(drafts) - 1

    def either(one: int, other: int) -> tuple[int, int]:
        return (one, other) if random.random() < 0.5 else (other, one)

    first = emit("add", *either(emit("sin", at["a"]), emit("cos", at["b"])))
    second = emit("mul", *either(emit("sub", at["c"], at["d"]), first))
    total = emit("add", *either(second, emit("mul", *either(at["e"], at["f"]))))
    labels = {i: d.target for i, d in enumerate(drafts) if d.kind == "input"}
    found, operands = canonical_order(drafts, [total], labels)
    place = {index: position for position, index in enumerate(found)}
    shape = [(drafts[i].target, [place[o] for o in operands[i]]) for i in found]
    assert shape == _expected()


def _expected() -> list[tuple[str, list[int]]]:
    """The canonical order of the unpermuted graph."""
    spec = TensorSpec(shape=(2,), dtype="float32")
    drafts = [Draft("input", name, spec=spec) for name in "abcdef"]
    for target, inputs in (
        ("sin", (0,)),
        ("cos", (1,)),
        ("add", (6, 7)),
        ("sub", (2, 3)),
        ("mul", (9, 8)),
        ("mul", (4, 5)),
        ("add", (10, 11)),
    ):
        drafts.append(Draft("op", target, inputs, spec=spec))
    labels = {i: d.target for i, d in enumerate(drafts) if d.kind == "input"}
    found, operands = canonical_order(drafts, [12], labels)
    place = {index: position for position, index in enumerate(found)}
    return [(drafts[i].target, [place[o] for o in operands[i]]) for i in found]
