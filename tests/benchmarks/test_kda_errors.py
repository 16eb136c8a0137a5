"""The exact values of ``kda_errors.py``: its recurrence beside the kernel folder's, and what an error is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import kda_errors

from shardwright.kernels.kda.reference import kda_chunk_reference, kda_recurrent_reference


@pytest.mark.parametrize("setting", ["usual-8k", "zero-beta", "repeated-keys"])
@pytest.mark.parametrize("gate", kda_errors.GATES)
def test_recurrence_is_the_reference(setting: str, gate: str) -> None:
    draws = [kda_errors.draw(setting, "cpu", 70, seed) for seed in (1, 2)]
    for drawn, found in zip(draws, kda_errors.exact(gate, draws), strict=True):
        expected = kda_errors.results(lambda *t: kda_recurrent_reference(*t, gate=gate), drawn, torch.float64)
        assert found.keys() == expected.keys()
        for name, error in kda_errors.errors(found, expected).items():
            assert error < 1e-12, name


def test_errors_of_bf16_are_those_of_its_rounding() -> None:
    drawn = kda_errors.draw("usual-8k", "cpu", 128)
    rounded = kda_errors.results(lambda *t: kda_chunk_reference(*t, gate="bounded"), drawn)
    (expected,) = kda_errors.exact("bounded", [drawn])
    for name, error in kda_errors.errors(rounded, expected).items():
        assert 2**-11 < error < 2**-5, name


def test_a_value_that_is_not_finite_has_no_error_bound() -> None:
    assert kda_errors.errors({"o": torch.tensor([1.0, float("nan")])}, {"o": torch.ones(2)}) == {"o": float("inf")}


def test_settings_are_what_they_say() -> None:
    _, k, *_ = kda_errors.given("repeated-keys", "cpu", 130)
    assert torch.equal(k[:, 0], k[:, 63]) and not torch.equal(k[:, 63], k[:, 64])
    beta = kda_errors.given("zero-beta", "cpu", 8)[4].float().sigmoid()
    assert float(beta[:, ::2].max()) < 1e-15 < float(beta[:, 1::2].min())
    gate = kda_errors.given("saturated", "cpu", 64)[3]
    assert float(gate.abs().min()) >= 12
