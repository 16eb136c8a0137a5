"""The bad-input kit that every registered operator inherits: refused with a typed error, or computed rightly.

Runs itself again under TRITON_INTERPRET=1, which must be set before triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")


@pytest.mark.skipif(INTERPRETED, reason="is already inside")
def test_all_in_the_interpreter(interpret: Callable[[str], None]) -> None:
    interpret("../test_bad_input.py")


if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

from shardwright.kernels.bad_input import CHANGES, changed_inputs, complaints  # noqa: E402
from shardwright.kernels.cases import BadInput  # noqa: E402
from shardwright.kernels.registry import OPERATORS, operator  # noqa: E402
from shardwright.kernels.verify import verify_case  # noqa: E402

EVERY = [(name, at) for name, entry in OPERATORS.items() for at in range(1 + len(entry.more_suites))]
REFUSE_EMPTY = ("linear_cross_entropy", "kda", "gated_delta", "short_conv")


@inside
@pytest.mark.parametrize(("name", "at"), EVERY)
def test_bad_input_is_refused_or_right(name: str, at: int) -> None:
    """Gaps, misalignment, mixed dtypes in every input, NaN rows, and what the operator itself lists."""
    suite = operator(name).load_suites()[at]
    found = complaints(suite, "cpu")
    assert len(found) >= len(CHANGES) * len(suite.input_names)
    assert {case: why for case, why in found.items() if why} == {}


@inside
@pytest.mark.parametrize(("name", "at"), EVERY)
def test_no_tokens_give_empty_outputs_attached_to_the_graph(name: str, at: int) -> None:
    """C4, C9: zero rows launch nothing; outputs and gradients have their shapes, zeros where rows are summed."""
    suite = operator(name).load_suites()[at]
    empty = [shape for shape in suite.small_shapes if 0 in shape.values()]
    assert empty or suite.op in REFUSE_EMPTY, "a mean over no token is NaN; the delta rule refuses no tokens"
    for shape in empty:
        results = verify_case(suite, shape, suite.dtypes[0], "cpu")
        assert [result for result in results if not result.ok] == []


@inside
def test_the_kit_catches_what_it_is_for() -> None:
    suite = operator("rms_norm").load_suite()

    def blind(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Takes any strides and reads memory as if it were dense."""
        dense = torch.as_strided(x, x.shape, (x.shape[1], 1))
        return suite.reference(dense, weight)

    def leaky(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Lets a NaN of one row reach all others."""
        return (suite.reference(x, weight)[0] + 0 * x.sum(),)

    def quiet(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (suite.reference(x, weight)[0].nan_to_num(),)

    assert complaints(replace(suite, fused=blind), "cpu")["x/gaps"]
    assert "another row" in complaints(replace(suite, fused=leaky), "cpu")["nan-row"]
    assert "numbers" in complaints(replace(suite, fused=quiet), "cpu")["nan-row"]
    silent = BadInput("silent", "wrong-shape", lambda: None)
    found = complaints(replace(suite, bad_inputs=lambda device: (silent,)), "cpu")
    assert found["refuses/silent"] == "was not refused"


@inside
def test_every_input_meets_every_change() -> None:
    suite = operator("permute").load_suite()
    met = {(name, change) for name, change, _, _ in changed_inputs(suite, "cpu")}
    assert met == {(name, change) for name in suite.input_names for change in CHANGES}
    for _, change, _, given in changed_inputs(suite, "cpu"):
        if change == "gaps":
            assert any(not tensor.is_contiguous() for tensor in given)
        if change == "shifted":
            assert any(tensor.data_ptr() % 16 for tensor in given)
