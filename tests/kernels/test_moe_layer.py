"""The whole MoE layer against fp64.

Runs itself again under TRITON_INTERPRET=1, which must be set before triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")


@pytest.mark.skipif(INTERPRETED, reason="is already inside")
def test_all_in_the_interpreter(interpret: Callable[[str], None]) -> None:
    interpret("../test_moe_layer.py")


if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

    from shardwright.kernels.moe_layer import cases
    from shardwright.kernels.verify import verify_case, verify_repeats


@inside
@pytest.mark.parametrize("lora", [False, True])
def test_error_is_no_larger_than_eagers(lora: bool) -> None:
    """Skewed, hot, empty, sentinel and token-less routings; fp32, bf16, NaN-poisoned memory, same bits."""
    suite = cases.LORA_SUITE if lora else cases.SUITE
    results = [
        result
        for shape in suite.small_shapes
        for dtype in (torch.float32, torch.bfloat16)
        for result in verify_case(suite, shape, dtype, "cpu")
    ]
    results.append(verify_repeats(suite, suite.small_shapes[0], torch.bfloat16, "cpu"))
    assert len(results) == 2 * len(suite.small_shapes) * (7 if lora else 3) + 1
    assert [result for result in results if not result.ok] == []
