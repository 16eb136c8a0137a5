"""The short convolution: numerics under the interpreter, counted launches and work, what its machine code computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

import triton

from shardwright.kernels.compile_gate import TARGET
from shardwright.kernels.launched import meta, recorded
from shardwright.kernels.short_conv import configs
from shardwright.kernels.short_conv.cases import compile_cases
from shardwright.kernels.short_conv.cost import cost
from shardwright.kernels.short_conv.op import short_conv


def test_interpreted(interpret: Callable[[str], None]) -> None:
    interpret("checks_short_conv.py")


@pytest.mark.parametrize("learns", [False, True])
def test_launches_are_the_counted_ones(learns: bool) -> None:
    """One forward with its final state; one backward, and one for the taps where they learn."""
    x, weight = meta((1, 256, 256), learns=True), meta((256, 4), learns=learns)
    names: list[str] = []
    with recorded(log=names):
        y, final = short_conv(x, weight, output_final_state=True)
        assert final is not None
        forward = len(names)
        torch.autograd.backward((y, final), (torch.empty_like(y), torch.empty_like(final)))
    counted = cost(256, 256, 4, "bfloat16", weight_gradient=learns)
    assert counted.backward is not None
    assert (forward, len(names) - forward) == (counted.forward.launches, counted.backward.launches)


def test_each_sum_is_made_once() -> None:
    """Exponentials of a backward: one a token for the J - 1 that it begins with and for each of a step, and a channel
    of the lane."""
    case = next(c for c in compile_cases() if c.kernel.fn.__name__ == "short_conv_bwd_kernel")
    compiled = triton.compile(case.source(), target=TARGET, options=case.compile_options())
    walk = configs.backward()
    lane = walk.channels // (32 * walk.warps)
    assert compiled.asm["ptx"].count("ex2.approx") == lane * (3 + walk.rows)


def test_counted_work() -> None:
    """T 8192, C 4096, J 4, bf16: three tensors move, and shares of the taps that are less than a tenth of them; a sum
    and its gate (16 flops), and a product and a sum for each tap of both gradients (8 each) a value, once."""
    found = cost(8192, 4096, 4, "bfloat16")
    width = 8192 * 4096 * 2
    assert found.backward is not None
    moved = found.backward.bytes_read + found.backward.bytes_written
    assert found.backward.floor_bytes == pytest.approx(3 * width, rel=1e-3)
    assert 3 * width < moved < 3.3 * width
    assert 32 < found.backward.flops / (8192 * 4096) < 33
