"""Every shipped launch configuration compiles for sm_90 without a GPU, fits and spills nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the gate's compiler is triton's")

from shardwright.kernels.compile_gate import SHARED_LIMIT_BYTES, CompileReport, compile_case
from shardwright.kernels.launch import Launch
from shardwright.kernels.registry import OPERATORS, operator
from shardwright.kernels.rms_norm.cases import row_case
from shardwright.kernels.rms_norm.triton import rms_norm_bwd_kernel, rms_norm_fwd_kernel
from shardwright.schemas.errors import KernelError


@pytest.mark.parametrize("name", OPERATORS)
def test_shipped_configurations_pass(name: str) -> None:
    reports = [compile_case(case) for case in operator(name).load_suite().compile_cases]
    assert reports
    assert [report.complaint for report in reports if report.complaint] == []
    assert all(report.vector_loads > 0 for report in reports), "16-byte loads everywhere"


def test_persistent_backwards_copy_ahead() -> None:
    cases = operator("rms_norm").load_suite().compile_cases
    wide = next(c for c in cases if c.name == "rms_norm_bwd/dw/7168/bfloat16")
    assert compile_case(wide).async_copies > 0


def test_a_spilling_configuration_is_refused() -> None:
    """Two rows of 8,192 columns in 16 warps need more registers than there are."""
    case = row_case("greedy", rms_norm_bwd_kernel, 7168, "bfloat16", Launch(2, 16, 3, 1), WEIGHT_GRADIENT=True)
    report = compile_case(case)
    assert report.spill_bytes > 0 and "spilled" in report.complaint


def test_too_much_shared_memory_is_refused() -> None:
    report = CompileReport("wide", 32, SHARED_LIMIT_BYTES + 1, 0, 0, 1)
    assert "shared memory" in report.complaint


def test_a_kernel_that_does_not_compile_is_named() -> None:
    case = row_case("ragged", rms_norm_fwd_kernel, 7168, "bfloat16", Launch(3, 4, 1, 0), RELOAD=False)
    with pytest.raises(KernelError) as caught:
        compile_case(case)
    assert caught.value.code == "kernel/does-not-compile" and caught.value.where.startswith("ragged")
