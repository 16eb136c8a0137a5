"""Gated RMSNorm: numerics under the interpreter, row layouts, guards, counted work, the sm_90 gate.

Legend: T tokens, H heads, D row width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.kernels.admitted import Admitted
from shardwright.kernels.gated_rms_norm import contract
from shardwright.kernels.gated_rms_norm.cost import cost
from shardwright.kernels.gated_rms_norm.rows import RowSteps, row_steps, steps
from shardwright.schemas.errors import KernelError

H200_BYTES_PER_S = 4.3e12


def test_interpreted(interpret: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    interpret("checks_gated_rms_norm.py")


def start_of(row: int, at: RowSteps) -> int:
    group = row // at.inner
    outer, middle = group // at.middle * at.outer_stride, group % at.middle * at.middle_stride
    return outer + middle + row % at.inner * at.inner_stride


@st.composite
def strided(draw: st.DrawFn) -> Any:
    """A view [.., D] of a dense array: sliced rows, permuted leading dimensions, expanded ones."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(sizes))))
    room = np.arange(int(np.prod(sizes)) * 8).reshape(*sizes, 8)
    low = draw(st.integers(0, 4))
    view = room.transpose(*order, len(sizes))[..., low : low + 3]
    if draw(st.booleans()):
        view = np.broadcast_to(view[:1], (3, *view.shape[1:]))
    return view


@given(view=strided())
def test_row_starts_are_those_of_the_layout(view: Any) -> None:
    """Against numpy's own indexing; a layout of more than three steps is refused, never misread."""
    strides = [stride // view.itemsize for stride in view.strides]
    rows = view.reshape(-1, view.shape[-1])[:, 0]
    origin = int(view.flat[0])
    if len(steps(view.shape[:-1], strides[:-1])) > 3:
        with pytest.raises(KernelError, match="steps between rows"):
            row_steps("op", "x", view.shape, strides)
        return
    found = row_steps("op", "x", view.shape, strides)
    assert [start_of(row, found) for row in range(len(rows))] == [int(first) - origin for first in rows]


def test_a_dense_tensor_needs_no_division() -> None:
    assert row_steps("op", "x", (2, 3, 4, 8), (96, 32, 8, 1)) == RowSteps(1, 1, 8, 0, 0)
    assert row_steps("op", "x", (2, 3, 4, 8), (600, 200, 8, 1)) == RowSteps(1, 4, 200, 0, 8)


@dataclass(frozen=True)
class Place:
    type: str


def double(
    shape: tuple[int, ...] = (4, 2, 96),
    dtype: str = "torch.bfloat16",
    place: str = "cuda",
    address: int = 4096,
    **how: Any,
) -> Any:
    """A tensor's facts."""
    dense = [1] * len(shape)
    for at in range(len(shape) - 2, -1, -1):
        dense[at] = dense[at + 1] * shape[at + 1]
    strides = how.get("strides", tuple(dense))
    return SimpleNamespace(
        shape=shape,
        dtype=dtype,
        device=Place(place),
        stride=lambda: strides,
        is_contiguous=lambda: how.get("contiguous", True),
        data_ptr=lambda: address,
    )


W = double((96,))


def test_a_layout_is_admitted_once_and_an_address_each_time() -> None:
    """Guards run for every new layout, setting or misaligned tensor, never again for a known one."""
    calls: list[str] = []
    door = Admitted(most=3)

    def enter(name: str, *tensors: Any, settings: Any = 1e-5) -> int:
        door.check(tensors, settings, lambda: calls.append(name))
        return len(calls)

    assert enter("first", double(), W) == enter("again", double(), W) == 1
    assert enter("other stride", double(strides=(600, 200, 1)), W) == 2
    assert enter("other eps", double(), W, settings=1e-6) == 3
    assert enter("moved by 8 bytes", double(address=4104), W) == 4, "known, but off its boundary"
    assert enter("absent", double(), None) == enter("absent again", double(), None) == 5

    def refuse() -> None:
        raise KernelError("no", "never", where="here", next_action="none")

    for _ in range(2):
        with pytest.raises(KernelError):
            door.check((double((1, 7)),), None, refuse)


@pytest.mark.parametrize(
    ("expected", "x", "gate", "weight"),
    [
        ("dtype-mixed", double(), double(dtype="torch.float32"), W),
        ("dtype-mixed", double(), double(), double((96,), "torch.float16")),
        ("dtype-unsupported", double(dtype="torch.float64"), double(dtype="torch.float64"), W),
        ("wrong-shape", double(), double((4, 2, 95)), W),
        ("wrong-shape", double(), double((4, 96)), W),
        ("wrong-shape", double(), double(), double((95,))),
        ("hidden-too-large", double((2, 8193)), double((2, 8193)), double((8193,))),
        ("device-unsupported", double(place="cpu"), double(place="cpu"), double((96,), place="cpu")),
        ("not-contiguous", double(), double(strides=(192, 1, 2)), W),
        ("not-contiguous", double(), double(), double((96,), contiguous=False)),
        ("misaligned", double(address=4098), double(), W),
        ("misaligned", double(), double(), double((96,), address=8)),
        ("too-many-rows", double((1 << 31, 96)), double((1 << 31, 96)), W),
    ],
)
def test_each_breach_has_its_code(expected: str, x: Any, gate: Any, weight: Any) -> None:
    if expected in ("dtype-unsupported",):
        weight = double((96,), "torch.float64")
    with pytest.raises(KernelError) as caught:
        contract.check(x, gate, weight, 1e-5, "silu", interpreted=False)
    assert caught.value.code == f"kernel/{expected}"
    assert caught.value.where == "gated_rms_norm" and caught.value.next_action


def test_good_inputs_pass() -> None:
    contract.check(double(), double(strides=(600, 200, 1)), W, 0.0, "sigmoid", interpreted=False)
    contract.check(double(), double(), double((96,), "torch.float32"), 1e-5, "silu", interpreted=False)
    contract.check(double((0, 96)), double((0, 96)), W, 1e-5, "silu", interpreted=False)


def test_floors_of_the_stated_case() -> None:
    """16,384 tokens, 32 heads of 128, bf16: 0.0936 ms forward, 0.1561 backward at 4.3 TB/s."""
    found = cost(16384, 32, 128, "bfloat16")
    assert found.backward is not None
    floors = [p.floor_bytes / H200_BYTES_PER_S * 1e3 for p in (found.forward, found.backward)]
    assert floors == pytest.approx([0.0936, 0.1561], abs=1e-4)


@given(
    T=st.integers(0, 1 << 18),
    H=st.integers(1, 96),
    D=st.integers(1, 8192),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    learns=st.booleans(),
)
def test_no_pass_moves_less_than_its_floor(T: int, H: int, D: int, dtype: str, learns: bool) -> None:
    found = cost(T, H, D, dtype, weight_gradient=learns)
    assert found.backward is not None
    for p in (found.forward, found.backward):
        assert p.bytes_read + p.bytes_written >= p.floor_bytes and p.flops >= p.floor_flops
    assert found.saved_bytes == 4 * T * H
    assert (found.backward.launches, bool(found.backward.workspace_bytes)) == ((2, T > 0) if learns else (1, False))


def test_persistent_backwards_copy_ahead_from_a_strided_gate() -> None:
    pytest.importorskip("triton")
    from shardwright.kernels.compile_gate import compile_case
    from shardwright.kernels.gated_rms_norm.cases import SUITE

    wanted = "gated_rms_norm_bwd/silu/dw/128/bfloat16/w-float32"
    report = compile_case(next(case for case in SUITE.gate_cases() if case.name == wanted))
    assert report.async_copies > 0 and report.vector_loads > 0 and not report.complaint
