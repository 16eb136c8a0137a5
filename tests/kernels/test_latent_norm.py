"""Latent norm: numerics under the interpreter, guards on doubles, counted work.

Legend: T rows, W width of the joint projection, H width of the latent.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.kernels.latent_norm import configs, contract
from shardwright.kernels.latent_norm.cost import cost
from shardwright.schemas.errors import KernelError

H200_BYTES_PER_S = 4.3e12


def test_interpreted(interpret: Callable[[str], None]) -> None:
    pytest.importorskip("triton")
    interpret("checks_latent_norm.py")


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
    )


JOINT, WEIGHT = double(4, 576), double(512)


def test_good_inputs_pass() -> None:
    contract.check(JOINT, WEIGHT, 1e-6, interpreted=False)
    contract.check(double(2, 4, 576, strides=(8448, 2112, 1)), WEIGHT, 0.0, interpreted=False)
    contract.check(double(0, 576), WEIGHT, 1e-6, interpreted=False)


@pytest.mark.parametrize(
    ("expected", "joint", "weight"),
    [
        ("dtype-mixed", JOINT, double(512, dtype="torch.float32")),
        ("dtype-unsupported", double(4, 576, dtype="torch.float64"), double(512, dtype="torch.float64")),
        ("wrong-shape", double(4, 511), WEIGHT),
        ("wrong-shape", JOINT, double(1, 512)),
        ("nothing-beside", double(4, 512), WEIGHT),
        ("hidden-too-large", double(4, 8194), WEIGHT),
        ("device-unsupported", double(4, 576, place="cpu"), double(512, place="cpu")),
        ("not-contiguous", double(4, 576, strides=(1, 4)), WEIGHT),
        ("misaligned", double(4, 576, address=4098), WEIGHT),
        ("row-layout", double(2, 2, 2, 2, 576, strides=(80000, 30000, 5000, 2000, 1)), WEIGHT),
        ("too-many-rows", double(1 << 31, 576), WEIGHT),
    ],
)
def test_each_breach_has_its_code(expected: str, joint: Any, weight: Any) -> None:
    with pytest.raises(KernelError) as caught:
        contract.check(joint, weight, 1e-6, interpreted=False)
    assert caught.value.code == f"kernel/{expected}"
    assert caught.value.where == "latent_norm" and caught.value.next_action


def test_floors_of_the_stated_case() -> None:
    """65,536 rows of 576, latent 512, bf16: 0.0312 ms forward, 0.0507 backward at 4.3 TB/s."""
    found = cost(65536, 576, 512, "bfloat16")
    assert found.backward is not None
    floors = [p.floor_bytes / H200_BYTES_PER_S * 1e3 for p in (found.forward, found.backward)]
    assert floors == pytest.approx([0.03121, 0.05072], abs=2e-5)


@given(T=st.integers(0, 1 << 18), H=st.integers(1, 4096), beside=st.integers(1, 4096), learns=st.booleans())
def test_no_pass_moves_less_than_its_floor(T: int, H: int, beside: int, learns: bool) -> None:
    found = cost(T, H + beside, H, "bfloat16", weight_gradient=learns)
    assert found.backward is not None
    for p in (found.forward, found.backward):
        assert p.bytes_read + p.bytes_written >= p.floor_bytes and p.flops >= p.floor_flops
    assert found.saved_bytes == 4 * T


@given(H=st.integers(1, 8191), beside=st.integers(1, 8191))
def test_launches_are_whole_tiles(H: int, beside: int) -> None:
    width = configs.tile_width(H + beside, H)
    assert width >= H + beside
    for launch in (configs.forward(width), configs.backward(width)):
        assert launch.rows & (launch.rows - 1) == 0 and launch.warps in (4, 8, 16)
