"""Bound launches on a device: later calls, on tensors at other addresses, give what triton's own launches give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from shardwright.kernels import bound  # noqa: E402
from shardwright.kernels.cases import OpSuite  # noqa: E402
from shardwright.kernels.registry import OPERATORS, operator  # noqa: E402

CALLS = 4
"""The first binds, the others are bound."""
FAR = 2e-2
"""Relative difference in bf16 above which results are other ones: sums may come in another order."""


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    bound.forget()
    yield monkeypatch
    bound.forget()


def passes(suite: OpSuite, seed: int) -> list[Tensor]:
    """Outputs and gradients of the largest shape that is verified, in bf16."""
    shape = max(suite.large_shapes or suite.small_shapes, key=lambda one: one.get("T", 0))
    given = suite.inputs(shape, torch.bfloat16, "cuda", seed)
    held = (*suite.constant, *suite.frozen)
    inputs = [
        tensor.detach().requires_grad_(tensor.is_floating_point() and name not in held)
        for tensor, name in zip(given, suite.input_names, strict=True)
    ]
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    outputs = suite.fused(*inputs)
    ends = [out for out in outputs if out.requires_grad]
    torch.manual_seed(seed)
    gradients = torch.autograd.grad(ends, leaves, [torch.randn_like(out) for out in ends]) if ends else ()
    return [*(out.detach() for out in outputs), *gradients]


@pytest.mark.parametrize("name", OPERATORS)
def test_bound_launches_give_the_same(name: str, switch: pytest.MonkeyPatch) -> None:
    for suite in operator(name).load_suites():
        if torch.bfloat16 not in suite.dtypes:
            continue
        switch.setattr(bound, "BINDS", False)
        wanted = [passes(suite, seed) for seed in range(CALLS)]
        switch.setattr(bound, "BINDS", True)
        found = [passes(suite, seed) for seed in range(CALLS)]
        assert bound.given_up() is None
        for seed, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                if b.is_floating_point():
                    gap = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)
                    assert float(gap) < FAR, (suite.op, seed, at, float(gap))
                else:
                    assert torch.equal(a, b), (suite.op, seed, at)


def test_something_is_bound(switch: pytest.MonkeyPatch) -> None:
    switch.setattr(bound, "BINDS", True)
    for suite in operator("moe_layer").load_suites():
        if torch.bfloat16 in suite.dtypes:
            passes(suite, 0)
    assert bound.given_up() is None and bound._bound
