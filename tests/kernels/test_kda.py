"""KDA: numerics under the interpreter, counted work."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwright.kernels.kda.cost import cost

H200_BYTES_PER_S = 4.3e12


def test_interpreted(interpret: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    interpret("checks_kda.py")


def test_floors_of_the_stated_case() -> None:
    """T 32768, H 32, K = V = 128, bf16: five tensors once forward, ten backward; states and betas beside them."""
    found = cost(32768, 32, 128, 128, "bfloat16")
    width = 32768 * 32 * 128 * 2
    assert found.backward is not None
    assert found.forward.floor_bytes == pytest.approx(5 * width, rel=0.01)
    assert found.backward.floor_bytes == pytest.approx(10 * width, rel=0.01)
    assert found.forward.floor_bytes / H200_BYTES_PER_S * 1e3 == pytest.approx(0.313, abs=2e-3)


def test_counted_traffic_in_widths() -> None:
    """What the design moves, in bf16 tensors of [T, H, 128]; memory kept for the backward is the output alone."""
    found = cost(32768, 32, 128, 128, "bfloat16")
    width = 32768 * 32 * 128 * 2
    assert found.backward is not None and found.saved_bytes == width
    forward, backward = ((p.bytes_read + p.bytes_written) / width for p in (found.forward, found.backward))
    assert (forward, backward) == pytest.approx((20.0, 53.5), abs=0.5)


def test_documents_add_their_last_chunks() -> None:
    one, many = (cost(4096, 2, 64, 64, "bfloat16", docs=n) for n in (1, 9))
    assert many.forward.flops == one.forward.flops * (64 + 8) // 64
