"""Query/key norm + RoPE: numerics under the interpreter, counted work, guards on doubles, shares of a grid.

Legend: T tokens, Q and K heads, D head width, W rotary width.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.kernels.qk_norm_rope import configs, contract
from shardwright.kernels.qk_norm_rope.cost import cost
from shardwright.schemas.errors import KernelError

H200_BYTES_PER_S = 4.3e12


def test_interpreted(interpret: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    interpret("checks_qk_norm_rope.py")


def double(*shape: int, dtype: str = "torch.bfloat16", place: str = "cuda", **how: Any) -> Any:
    """A tensor's facts; dense unless told otherwise."""
    strides = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        strides[at] = strides[at + 1] * shape[at + 1]
    return SimpleNamespace(
        shape=shape,
        dtype=dtype,
        device=SimpleNamespace(type=place),
        stride=lambda: how.get("strides", tuple(strides)),
        is_contiguous=lambda: how.get("contiguous", True),
        data_ptr=lambda: how.get("address", 4096),
        requires_grad=how.get("requires_grad", False),
    )


GOOD: dict[str, Any] = {
    "q": double(2, 8, 4, 64),
    "k": double(2, 8, 2, 64),
    "cos": double(2, 8, 32),
    "sin": double(2, 8, 32),
    "q_weight": double(64),
    "k_weight": double(64),
    "eps": 1e-6,
    "width": 32,
    "pairing": "half",
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"q_weight": None, "k_weight": None, "eps": None},
        {"q": double(2, 8, 4, 64, strides=(6144, 768, 64, 1)), "width": 64, "pairing": "interleaved"},
        {"k": double(2, 8, 1, 32), "k_weight": double(32), "pairing": "interleaved-to-half"},
        {"cos": double(8, 16), "sin": double(8, 16)},
        {"cos": double(1, 8, 32, dtype="torch.float32"), "sin": double(1, 8, 32, dtype="torch.float32")},
        {"q": double(0, 8, 4, 64), "k": double(0, 8, 2, 64), "cos": double(1, 8, 32), "sin": double(1, 8, 32)},
    ],
)
def test_good_inputs_pass(change: dict[str, Any]) -> None:
    contract.check(**{**GOOD, **change}, interpreted=False)


@pytest.mark.parametrize(
    ("expected", "change"),
    [
        ("dtype-mixed", {"k": double(2, 8, 2, 64, dtype="torch.float16")}),
        ("dtype-mixed", {"sin": double(2, 8, 32, dtype="torch.float32")}),
        (
            "dtype-unsupported",
            {"cos": double(2, 8, 32, dtype="torch.int64"), "sin": double(2, 8, 32, dtype="torch.int64")},
        ),
        ("wrong-shape", {"k": double(2, 7, 2, 64)}),
        ("wrong-shape", {"q": double(8, 64), "k": double(8, 64)}),
        ("wrong-shape", {"q_weight": double(63)}),
        ("hidden-too-large", {"q": double(2, 8, 4, 514)}),
        ("one-weight", {"q_weight": None}),
        ("bad-epsilon", {"eps": None}),
        ("bad-epsilon", {"q_weight": None, "k_weight": None}),
        ("rotary-width", {"width": 33}),
        ("rotary-width", {"width": 66}),
        ("rotary-width", {"width": 0}),
        ("unknown-pairing", {"pairing": "thirds"}),
        ("table-shape", {"cos": double(2, 9, 32), "sin": double(2, 9, 32)}),
        ("table-shape", {"cos": double(3, 8, 32), "sin": double(3, 8, 32)}),
        ("table-shape", {"cos": double(2, 8, 30), "sin": double(2, 8, 30)}),
        ("table-shape", {"sin": double(8, 32)}),
        ("device-unsupported", {name: double(*GOOD[name].shape, place="cpu") for name in list(GOOD)[:6]}),
        ("not-contiguous", {"q": double(2, 8, 4, 64, strides=(2048, 256, 1, 4))}),
        ("not-contiguous", {"k_weight": double(64, contiguous=False)}),
        ("misaligned", {"k": double(2, 8, 2, 64, address=4098)}),
        ("misaligned", {"cos": double(2, 8, 32, address=4100)}),
        (
            "too-many-rows",
            {
                "q": double(1, 1 << 29, 4, 64),
                "k": double(1, 1 << 29, 2, 64),
                "cos": double(1 << 29, 32),
                "sin": double(1 << 29, 32),
            },
        ),
        ("table-needs-gradient", {"sin": double(2, 8, 32, requires_grad=True)}),
    ],
)
def test_each_breach_has_its_code(expected: str, change: dict[str, Any]) -> None:
    with pytest.raises(KernelError) as caught:
        contract.check(**{**GOOD, **change}, interpreted=False)
    assert caught.value.code == f"kernel/{expected}"
    assert caught.value.where == "qk_norm_rope" and caught.value.next_action


def test_floors_of_qwen3_30b() -> None:
    """8,192 tokens, 32 + 4 heads of 128, bf16: 0.0356 ms forward, 0.0532 backward at 4.3 TB/s."""
    found = cost(8192, 32, 4, 128, 128, "bfloat16")
    assert found.backward is not None
    floors = [p.floor_bytes / H200_BYTES_PER_S * 1e3 for p in (found.forward, found.backward)]
    assert floors == pytest.approx([0.03561, 0.05317], abs=2e-5)
    alone = cost(8192, 32, 4, 128, 128, "bfloat16", norm=0)
    assert alone.backward is not None
    assert alone.backward.floor_bytes < found.backward.floor_bytes, "a bare rotation need not read its input again"


@given(
    T=st.integers(0, 1 << 16),
    Q=st.integers(1, 128),
    K=st.integers(1, 16),
    half=st.integers(1, 128),
    beside=st.integers(0, 256),
    norm=st.integers(0, 1),
    learns=st.booleans(),
)
def test_no_pass_moves_less_than_its_floor(
    T: int, Q: int, K: int, half: int, beside: int, norm: int, learns: bool
) -> None:
    found = cost(T, Q, K, 2 * half + beside, 2 * half, "bfloat16", norm=norm, weight_gradient=learns)
    assert found.backward is not None
    for p in (found.forward, found.backward):
        assert p.bytes_read + p.bytes_written >= p.floor_bytes and p.flops >= p.floor_flops
    assert found.backward.launches == (3 if norm and learns else 1)
    assert found.saved_bytes == 0


@given(queries=st.integers(1, 1 << 20), keys=st.integers(1, 1 << 20), programs=st.integers(1, 2112))
def test_programs_are_shared_fairly(queries: int, keys: int, programs: int) -> None:
    """At least one each, never more than there are tiles, and a share of both in proportion."""
    pytest.importorskip("triton")
    from shardwright.kernels.qk_norm_rope.launches import share

    first, second = share((queries, keys), programs)
    assert 1 <= first <= queries and 1 <= second <= keys
    assert first + second <= max(2, programs)
    if programs >= 64 and min(queries, keys) > programs:
        loads = queries / first, keys / second
        assert max(loads) <= 2 * (queries + keys) / programs or 1 in (first, second)


@given(half=st.integers(1, 256), beside=st.integers(0, 511))
def test_tiles_hold_every_dimension(half: int, beside: int) -> None:
    width = configs.tile_width(2 * half + beside, 2 * half)
    assert 2 * half + beside <= width <= 2 * (2 * half + beside) + 2
    for launch in (configs.forward(width), configs.backward(width)):
        assert launch.rows & (launch.rows - 1) == 0 and launch.rows * width <= 4096


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_suite_on_a_device() -> None:
    from shardwright.kernels.qk_norm_rope.cases import MLA_SUITE, PAIRS_SUITE, SUITE
    from shardwright.kernels.verify import verify_case

    for suite in (SUITE, PAIRS_SUITE, MLA_SUITE):
        for shape in (*suite.small_shapes, *suite.large_shapes):
            for dtype in suite.dtypes:
                assert [r for r in verify_case(suite, shape, dtype, "cuda") if not r.ok] == []
