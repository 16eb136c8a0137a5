"""Every shipped launch configuration compiles for sm_90 without a GPU, fits and spills nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the gate's compiler is triton's")

from shardwright.kernels.compile_gate import SHARED_LIMIT_BYTES, AnyCase, CompileReport, LaunchCase, compile_case
from shardwright.kernels.launch import Launch
from shardwright.kernels.launched import meta, recorded
from shardwright.kernels.registry import OPERATORS, operator, sources
from shardwright.kernels.rms_norm.cases import row_case
from shardwright.kernels.rms_norm.triton import rms_norm_bwd_kernel, rms_norm_fwd_kernel
from shardwright.schemas.errors import KernelError

QUICK = tuple(name for name in OPERATORS if name not in ("grouped_lora_mlp", "moe_layer"))
"""Operators all of whose launches are compiled here; of the others one size is (`kernels prebuild` does all)."""


def check(cases: Iterable[AnyCase]) -> None:
    """All fit, spill no more than they state, and load wide; one compilation for each distinct launch."""
    distinct: list[AnyCase] = []
    for case in cases:
        if not any(isinstance(o, LaunchCase) and isinstance(case, LaunchCase) and case.same_as(o) for o in distinct):
            distinct.append(case)
    reports = [compile_case(case) for case in distinct]
    assert reports
    assert [report.complaint for report in reports if report.complaint] == []


@pytest.mark.parametrize("name", QUICK)
def test_shipped_configurations_pass(name: str) -> None:
    check(case for suite in operator(name).load_suites() for case in suite.gate_cases())


@pytest.mark.parametrize("name", ["grouped_lora_mlp", "moe_layer"])
def test_shipped_expert_products_pass(name: str) -> None:
    """The training launches with LoRA at the first benchmark size: every kernel of the path, once."""
    suite = operator(name).load_suites()[1]
    assert "lora" in suite.bench[0].case
    cases = suite.gate_cases()
    check(case for case in cases if case.name.startswith(suite.bench[0].case))


def test_the_portable_product_passes() -> None:
    """Its launches for experts with few rows, gathered and contiguous, over either dim of a stack."""
    cases = operator("moe_layer").load_suites()[0].gate_cases()
    portable = [case for case in cases if case.kernel.fn.__name__ == "product_kernel"]
    assert len(portable) == 4
    check(portable)


def test_a_biased_product_and_a_stack_gradient_pass() -> None:
    """Of the launches with biases on a base that learns, those that no other case compiles."""
    cases = operator("moe_layer").load_suites()[2].gate_cases()
    new = [c for c in cases if c.kernel.fn.__name__ == "stack_grad_kernel" or biased(c)]
    assert {case.kernel.fn.__name__ for case in new} >= {
        "stack_grad_kernel",
        "hopper_product_kernel",
        "activation_bwd_kernel",
    }
    check(new)


def biased(case: AnyCase) -> bool:
    names = list(case.kernel.arg_names)
    return "BIAS" in names and bool(case.constants.get((names.index("BIAS"),)))


def test_a_recorded_launch_is_the_one_that_runs() -> None:
    """Constants, types and alignment are those of the call; a second like call adds nothing."""
    op = operator("rms_norm").load_op()
    with recorded() as found:
        for rows in (7, 9):
            op(meta((rows, 7168), torch.bfloat16), meta((7168,), torch.bfloat16), 1e-6)
    (case,) = found
    names = list(case.kernel.arg_names)
    assert case.constants[(names.index("COLUMNS"),)] == 8192 and case.signature["x_ptr"] == "*bf16"
    assert (names.index("H"),) in case.attributes and (names.index("T"),) not in case.attributes
    assert compile_case(case).complaint == ""


DW = {"SINGLE": False, "WEIGHT_GRADIENT": True}


def test_an_allowance_for_spills_needs_a_reason() -> None:
    case = row_case(
        "greedy", rms_norm_bwd_kernel, 7168, "bfloat16", Launch(2, 16, 3, 1), SINGLE=False, WEIGHT_GRADIENT=True
    )
    with pytest.raises(ValueError, match="reason"):
        replace(case, spill_allowance=64)
    allowed = replace(case, spill_allowance=1 << 20, spill_reason="a test of the allowance")
    report = compile_case(allowed)
    assert report.spill_bytes > 0 and report.complaint == ""


def test_a_kernel_of_narrow_loads_is_refused() -> None:
    report = CompileReport("narrow", 32, 0, 0, 0, vector_loads=0)
    assert "16 bytes wide" in report.complaint
    assert replace(report, narrow="moves indices only").complaint == ""
    assert replace(report, tensor_copies=1).complaint == ""


def test_persistent_backwards_copy_ahead() -> None:
    cases = operator("rms_norm").load_suite().gate_cases()
    wide = next(c for c in cases if c.name == "rms_norm_bwd/dw/7168/bfloat16")
    assert compile_case(wide).async_copies > 0


def test_a_spilling_configuration_is_refused() -> None:
    """Two rows of 8,192 columns in 16 warps need more registers than there are."""
    case = row_case(
        "greedy", rms_norm_bwd_kernel, 7168, "bfloat16", Launch(2, 16, 3, 1), SINGLE=False, WEIGHT_GRADIENT=True
    )
    report = compile_case(case)
    assert report.spill_bytes > 0 and "spilled" in report.complaint


def test_too_much_shared_memory_is_refused() -> None:
    report = CompileReport("wide", 32, SHARED_LIMIT_BYTES + 1, 0, 0, 1)
    assert "shared memory" in report.complaint


def test_e3_no_loop_asks_the_compiler_to_specialise_its_warps() -> None:
    """``tl.range(warp_specialize=True)`` crashes or gives wrong numbers around products of pointer loads; kernels
    whose warps specialise say so themselves, in Gluon."""
    for name in OPERATORS:
        assert not [path for path in sources(name) if "warp_specialize=" in path.read_text()]


def test_a_kernel_that_does_not_compile_is_named() -> None:
    case = row_case("ragged", rms_norm_fwd_kernel, 7168, "bfloat16", Launch(3, 4, 1, 0), RELOAD=False)
    with pytest.raises(KernelError) as caught:
        compile_case(case)
    assert caught.value.code == "kernel/does-not-compile" and caught.value.where.startswith("ragged")
