"""Which case times a call at sizes that somebody else names, and what is said where none does."""

from __future__ import annotations

import pytest
import torch

from shardwright.kernels.called import Called, called
from shardwright.kernels.evidence import shape_bucket
from shardwright.kernels.registry import OPERATORS
from shardwright.schemas.ops import OperatorCall, PassName

PASSES: tuple[PassName, ...] = ("fwd+dx", "fwd+bwd")


def of(op: str, dtype: str = "bfloat16", **sizes: int) -> Called:
    return called(OperatorCall(op=op, dtype=dtype, sizes=sizes, pass_name="fwd+dx"), PASSES)


@pytest.mark.parametrize("op", OPERATORS)
def test_what_a_suite_times_anyway_is_timed_at_these_sizes(op: str) -> None:
    for suite in OPERATORS[op].load_suites():
        for case in suite.bench:
            found = of(op, str(case.dtype).rpartition(".")[2], **case.shape)
            assert found.case is not None and found.refusal is None, (case.case, found.because)
            assert shape_bucket(found.case.shape) == shape_bucket(case.shape) and found.case.dtype == case.dtype


@pytest.mark.parametrize(
    ("op", "sizes", "wanted"),
    [
        ("rms_norm", {"T": 4000, "H": 5120}, "fwd+dx"),
        ("moe_layer", {"T": 4096, "K": 6, "E": 64, "H": 2048, "I": 1408}, "fwd+dx"),
        ("short_conv", {"T": 4096, "C": 4096, "J": 4}, "fwd+dx"),
        ("kda", {"T": 4096, "H": 16, "K": 128, "V": 128, "docs": 1}, "fwd+bwd"),
        ("qk_norm_rope", {"T": 4096, "Q": 32, "K": 2, "D": 128, "W": 64, "pairing": 1, "norm": 0}, "fwd+bwd"),
    ],
)
def test_sizes_that_a_suite_reads_may_be_any(op: str, sizes: dict[str, int], wanted: str) -> None:
    found = of(op, **sizes)
    assert found.case is not None and dict(found.case.shape) == sizes
    assert found.case.passes == (wanted,) and found.case.dtype == torch.bfloat16
    assert found.pair == ((found.suite, found.case),)


def test_of_suites_that_take_the_same_sizes_the_one_timed_at_them_goes_first() -> None:
    main, _, biased = OPERATORS["packed_experts"].load_suites()
    wide = next(case.shape for case in biased.bench if case.case == "moe-mxfp4/gpt-oss")
    assert of("packed_experts", **{**wide, "R": 1000}).suite is biased
    assert of("packed_experts", R=1000, E=8, H=1024, I=512).suite is main


@pytest.mark.parametrize(
    ("op", "sizes", "said"),
    [
        ("linear_cross_entropy", {"T": 4096, "H": 7168, "V": 129_280}, "decides V by itself"),
        ("router", {"T": 4096, "E": 128, "k": 6}, "decides k by itself"),
        ("dsa", {"T": 4096, "H": 64, "N": 64, "D": 128, "K": 2048, "V": 512, "R": 64}, "decides K by itself"),
        ("qk_norm_rope", {"T": 4096, "Q": 8, "K": 8, "D": 128, "W": 64, "pairing": 0, "norm": 0}, "decides pairing"),
        ("rms_norm", {"T": 4096, "H": 64, "odd": 1}, "no suite of rms_norm makes inputs from H, T, odd"),
        ("rms_norm", {"T": 4096}, "no suite of rms_norm makes inputs from T"),
        ("packed_experts", {"R": 64, "E": 8, "H": 64, "I": 64, "bits": 8}, "makes inputs from E, H, I, R, bits"),
    ],
)
def test_what_has_no_inputs_is_said_with_its_sizes(op: str, sizes: dict[str, int], said: str) -> None:
    found = of(op, **sizes)
    assert found.case is None and found.pair == () and said in found.because
    assert found.refusal is not None and found.refusal.code == "kernel/no-inputs"
    assert shape_bucket(sizes) in found.refusal.where and found.refusal.next_action


def test_a_table_over_model_sizes_holds_for_any_rows_and_one_over_rows_only_for_its_own() -> None:
    head = of("linear_cross_entropy", T=1234, H=7168, V=163_840)
    assert head.case is not None and head.case.shape["T"] == 1234
    near = of("router", T=8000, E=128, k=8)
    assert near.case is not None and dict(near.case.shape) == {"T": 8192, "E": 128, "k": 8}, "its k is 8 at these rows"
    assert of("router", T=4096, E=128, k=8).case is None


def test_a_dtype_that_no_suite_takes_is_said() -> None:
    assert "is timed in bfloat16, not in float32" in of("kda", "float32", T=64, H=2, K=16, V=16, docs=1).because
