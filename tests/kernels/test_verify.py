"""The verifier itself: it must catch operators that are subtly wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="suites name triton kernels")

from shardwright.kernels.cases import OpSuite
from shardwright.kernels.registry import operator
from shardwright.kernels.suite import main, verify_table
from shardwright.kernels.verify import poisoned_memory, verify_case, verify_repeats

SHAPE = {"T": 64, "H": 96}
EPS = 1e-6


def suite(fused: Callable[..., tuple[Tensor, ...]]) -> OpSuite:
    return replace(operator("rms_norm").load_suite(), fused=fused)


def right(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return operator("rms_norm").load_suite().reference(x, weight)


def rounded_twice(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Statistics in the input's dtype: the classic mistake."""
    return (weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS),)


def forgotten_row(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y = torch.empty_like(x)
    y[:-1] = right(x, weight)[0][:-1]
    return (y,)


def wide_product(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (right(x, weight)[0].float(),)


def no_weight_gradient(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (right(x, weight.detach())[0] + 0 * weight,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_reference_passes(dtype: torch.dtype) -> None:
    assert all(r.ok for r in verify_case(suite(right), SHAPE, dtype, "cpu"))


@pytest.mark.parametrize(
    ("fused", "value", "dtype"),
    [
        (rounded_twice, "y", torch.bfloat16),
        (forgotten_row, "y", torch.bfloat16),
        (forgotten_row, "y", torch.float32),
        (wide_product, "y", torch.bfloat16),
        (no_weight_gradient, "dweight", torch.float32),
    ],
)
def test_a_wrong_operator_is_caught(fused: Callable[..., tuple[Tensor, ...]], value: str, dtype: torch.dtype) -> None:
    results = verify_case(suite(fused), SHAPE, dtype, "cpu")
    assert value in [r.value for r in results if not r.ok]
    assert "WRONG" in verify_table(results)


def test_changing_bits_are_caught() -> None:
    count = iter(range(100))

    def drifting(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (right(x, weight)[0] * (1 + 1e-3 * next(count)),)

    assert not verify_repeats(suite(drifting), SHAPE, torch.float32, "cpu").ok
    assert verify_repeats(suite(right), SHAPE, torch.float32, "cpu").ok


def test_poison_is_taken_away_again() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert bool(torch.empty(100).isnan().all())
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_suite_says_what_to_do(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path), "--ops", "rms_norm"]) == 1
    assert "kernel/device-unsupported" in capsys.readouterr().err
