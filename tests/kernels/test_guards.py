"""Guards on doubles of tensors: no device is needed to refuse an input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.kernels import guards
from shardwright.kernels.add_rms_norm import contract as add_contract
from shardwright.kernels.rms_norm import contract
from shardwright.schemas.errors import KernelError


@dataclass(frozen=True)
class Double:
    """A tensor's facts."""

    shape: tuple[int, ...] = (4, 96)
    dtype: str = "torch.bfloat16"
    place: str = "cuda"
    contiguous: bool = True
    address: int = 4096

    @property
    def device(self) -> Any:
        return SimpleNamespace(type=self.place.split(":")[0], __str__=lambda _: self.place)

    def is_contiguous(self) -> bool:
        return self.contiguous

    def data_ptr(self) -> int:
        return self.address


X, W = Double(), Double(shape=(96,))


def code(x: Double, weight: Double, eps: float = 1e-6, interpreted: bool = False) -> str:
    with pytest.raises(KernelError) as caught:
        contract.check(x, weight, eps, interpreted=interpreted)
    assert caught.value.where == "rms_norm" and caught.value.next_action
    return caught.value.code.removeprefix("kernel/")


def test_good_inputs_pass() -> None:
    contract.check(X, W, 1e-6, interpreted=False)
    contract.check(replace(X, shape=(0, 96)), W, 0.0, interpreted=False)
    contract.check(replace(X, shape=(2, 3, 96)), W, 1e-5, interpreted=False)
    add_contract.check(X, X, W, 1e-6, interpreted=False)


@pytest.mark.parametrize(
    ("expected", "x", "weight"),
    [
        ("dtype-mixed", X, replace(W, dtype="torch.float32")),
        ("dtype-unsupported", replace(X, dtype="torch.float64"), replace(W, dtype="torch.float64")),
        ("wrong-shape", replace(X, shape=(4, 95)), W),
        ("wrong-shape", X, replace(W, shape=(1, 96))),
        ("wrong-shape", replace(X, shape=()), W),
        ("wrong-shape", replace(X, shape=(4, 0)), replace(W, shape=(0,))),
        ("hidden-too-large", replace(X, shape=(4, 8193)), replace(W, shape=(8193,))),
        ("not-contiguous", replace(X, contiguous=False), W),
        ("misaligned", X, replace(W, address=4098)),
        ("device-unsupported", replace(X, place="cpu"), replace(W, place="cpu")),
    ],
)
def test_each_breach_has_its_code(expected: str, x: Double, weight: Double) -> None:
    assert code(x, weight) == expected


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf")])
def test_epsilon_is_a_small_number(eps: float) -> None:
    assert code(X, W, eps) == "bad-epsilon"


def test_the_cpu_is_for_the_interpreter() -> None:
    contract.check(replace(X, place="cpu"), replace(W, place="cpu"), 1e-6, interpreted=True)


def test_residual_has_the_shape_of_x() -> None:
    with pytest.raises(KernelError, match="residual is"):
        add_contract.check(X, replace(X, shape=(5, 96)), W, 1e-6, interpreted=False)


def test_dtype_names_are_those_of_costs() -> None:
    assert set(contract.DTYPES) <= set(guards.BYTES)
    assert guards.dtype_name(X) == "bfloat16"


def test_obligations_are_unique() -> None:
    assert len(set(contract.OBLIGATIONS)) == len(contract.OBLIGATIONS)
    assert set(contract.ROLES) >= {"x", "weight"}
