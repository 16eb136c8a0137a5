"""The plain interpreter's bf16 is wrong: why ``kernels.interpreter`` exists. Runs under TRITON_INTERPRET=1.

When a new triton makes one of these fail, the interpreter has learnt bf16 and our own can go.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardwright.kernels.interpreter import SUPPORTED


@triton.jit
def multiply_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(a_ptr + at) * tl.load(b_ptr + at))


@triton.jit
def narrow_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(tl.bfloat16))


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr):
    at = tl.arange(0, M)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def draw(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_this_is_the_pinned_triton() -> None:
    assert triton.__version__.startswith(SUPPORTED + ".")


def test_plain_products_are_wrong() -> None:
    a, b = draw((256,), 1).bfloat16(), draw((256,), 2).bfloat16()
    out = torch.zeros_like(a)
    multiply_kernel[(1,)](a, b, out, 256)
    wrong = (out != a * b).float().mean()
    assert float(wrong) > 0.9


def test_plain_casts_truncate() -> None:
    x, out = draw((4096,), 3), torch.zeros(4096, dtype=torch.bfloat16)
    narrow_kernel[(1,)](x, out, 4096)
    wrong = float((out != x.bfloat16()).float().mean())
    assert 0.3 < wrong < 0.7
    truncated = (x.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(out.float(), truncated)


def test_plain_dots_are_wrong() -> None:
    a, b = draw((32, 32), 4).bfloat16(), draw((32, 32), 5).bfloat16()
    out = torch.zeros(32, 32)
    product_kernel[(1,)](a, b, out, 32)
    exact = a.double() @ b.double()
    assert float((out.double() - exact).norm() / exact.norm()) > 1e3
