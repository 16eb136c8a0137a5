"""bf16 in the interpreter: torch's own bf16 arithmetic is the judge. Runs under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from shardwright.kernels import interpreter

interpreter.install()


@triton.jit
def arithmetic_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr, OP: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    if OP == "add":
        out = a + b
    elif OP == "mul":
        out = a * b
    elif OP == "sub":
        out = a - b
    elif OP == "max":
        out = tl.maximum(a, b)
    elif OP == "where":
        out = tl.where(a > b, a, -b)
    else:
        out = tl.abs(a)
    tl.store(out_ptr + at, out)


@triton.jit
def cast_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16))


@triton.jit
def implicit_store_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, M)
    at = rows[:, None] * M + columns[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def masked_kernel(x_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n, other=1.5), mask=at < n + 1)


@triton.jit
def atomic_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.atomic_add(out_ptr + at % 4, tl.load(x_ptr + at))


@triton.jit
def bits_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.int16, bitcast=True))


@triton.jit
def reduce_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr, tl.sum(x, axis=0))
    tl.store(out_ptr + 1, tl.max(x, axis=0))


def draw(n: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("op", ["add", "mul", "sub", "max", "where", "abs"])
def test_arithmetic_gives_torch_bits(op: str) -> None:
    a, b = draw(1024, 1), draw(1024, 2)
    out = torch.full_like(a, float("nan"))
    arithmetic_kernel[(1,)](a, b, out, 1024, op)
    expected = {
        "add": a + b,
        "mul": a * b,
        "sub": a - b,
        "max": torch.maximum(a, b),
        "where": torch.where(a > b, a, -b),
        "abs": a.abs(),
    }[op]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", [cast_kernel, implicit_store_kernel])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_to_nearest_even(kernel: object, dtype: torch.dtype) -> None:
    """Every tie between two bf16 neighbours, and random values."""
    if kernel is implicit_store_kernel and dtype == torch.float64:
        dtype = torch.float32
    grid = torch.arange(0x3F00, 0x4080, dtype=torch.int16).view(torch.bfloat16).double()
    ties = (grid[:-1] + grid[1:]) / 2
    values = torch.cat([ties, -ties, ties * (1 + 2.0**-20), draw(1024, 3, torch.float64)])
    values = torch.nn.functional.pad(values, (0, 4096 - len(values))).to(dtype)
    out = torch.full((4096,), float("nan"), dtype=torch.bfloat16)
    kernel[(1,)](values, out, 4096)  # type: ignore[index]
    assert torch.equal(out, values.to(torch.bfloat16))
    even = (ties.to(torch.bfloat16).view(torch.int16) & 1) == 0
    assert bool(even.all()), "the judge itself rounds ties to even"


def test_special_values_survive() -> None:
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 3.4e38, -3.4e38, 1e-40])
    out = torch.zeros(8, dtype=torch.bfloat16)
    cast_kernel[(1,)](special, out, 8)
    torch.testing.assert_close(out, special.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def test_dot_accumulates_in_fp32() -> None:
    a, b = draw(64 * 64, 4).view(64, 64), draw(64 * 64, 5).view(64, 64)
    out = torch.full((64, 64), float("nan"))
    dot_kernel[(1,)](a, b, out, 64)
    exact = a.double() @ b.double()
    assert float((out.double() - exact).norm() / exact.norm()) < 1e-6


def test_masked_lanes_get_other() -> None:
    x, out = draw(64, 6), torch.full((64,), float("nan"), dtype=torch.bfloat16)
    masked_kernel[(1,)](x, out, 40, 64)
    assert torch.equal(out[:40], x[:40])
    assert float(out[40]) == 1.5
    assert bool(out[41:].isnan().all())


def test_atomic_add_rounds_each_step() -> None:
    x, out = draw(32, 7), torch.zeros(4, dtype=torch.bfloat16)
    atomic_kernel[(1,)](x, out, 32)
    expected = torch.zeros(4, dtype=torch.bfloat16)
    for lane in range(32):
        expected[lane % 4] += x[lane]
    assert torch.equal(out, expected)


def test_bitcast_shows_memory_bits() -> None:
    x, out = draw(128, 8), torch.zeros(128, dtype=torch.int16)
    bits_kernel[(1,)](x, out, 128)
    assert torch.equal(out, x.view(torch.int16))


def test_reductions() -> None:
    x, out = draw(512, 9), torch.zeros(2, dtype=torch.bfloat16)
    reduce_kernel[(1,)](x, out, 512)
    assert abs(float(out[0]) - float(x.double().sum())) <= 2.0**-8 * abs(float(x.double().sum())) + 1e-4
    assert torch.equal(out[1], x.max())
