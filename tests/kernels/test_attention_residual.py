"""Attention residuals: numerics under the interpreter, counted work, and how far ahead the kernels load.

Legend: T tokens, R rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.kernels.attention_residual.cost import cost

H200_BYTES_PER_S = 4.3e12


def test_interpreted(interpret: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    interpret("checks_attention_residual.py")


def test_floors_of_the_stated_case() -> None:
    """8,192 tokens, 9 rows of 7,168 in bf16 at 4.3 TB/s: ten tensors forward, nineteen backward."""
    found = cost(8192, 9, 7168, "bfloat16")
    assert found.backward is not None
    floors = [p.floor_bytes / H200_BYTES_PER_S * 1e3 for p in (found.forward, found.backward)]
    assert floors == pytest.approx([0.2731, 0.5190], abs=1e-4)


@given(
    T=st.integers(0, 1 << 18),
    R=st.integers(1, 16),
    H=st.integers(1, 8192),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    learns=st.booleans(),
)
def test_no_pass_moves_less_than_its_floor(T: int, R: int, H: int, dtype: str, learns: bool) -> None:
    found = cost(T, R, H, dtype, weight_gradient=learns)
    assert found.backward is not None
    for p in (found.forward, found.backward):
        assert p.bytes_read + p.bytes_written >= p.floor_bytes and p.flops >= p.floor_flops
    assert found.saved_bytes == 4 * T * (2 * R + 1)


def test_rows_are_on_their_way_before_they_are_read() -> None:
    """Both kernels copy the next rows while one is mixed, 16 bytes at a time, whatever row an address belongs to."""
    pytest.importorskip("triton")
    from shardwright.kernels.attention_residual.cases import SUITE
    from shardwright.kernels.compile_gate import compile_case

    wanted = [case for case in SUITE.gate_cases() if case.name.startswith("attention_residual/7168/bfloat16/frozen")]
    reports = [compile_case(case) for case in wanted]
    assert len(reports) == 2
    assert all(report.async_copies > 0 and report.vector_loads > 0 and not report.complaint for report in reports)
