"""The grouped LoRA MLP against fp64.

Runs itself again under TRITON_INTERPRET=1, which must be set before triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")


@pytest.mark.skipif(INTERPRETED, reason="is already inside")
def test_all_in_the_interpreter(interpret: Callable[[str], None]) -> None:
    interpret("../test_grouped_lora_mlp.py")


if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

    from shardwright.kernels.grouped_lora_mlp import cases
    from shardwright.kernels.grouped_lora_mlp.contract import Activation, Kind, Layout
    from shardwright.kernels.grouped_lora_mlp.launches import launch_product
    from shardwright.kernels.grouped_lora_mlp.lora_launch import Side, launch_adapter_grad, launch_shrink
    from shardwright.kernels.grouped_lora_mlp.op import grouped_lora_mlp
    from shardwright.kernels.grouped_lora_mlp.reference import grouped_lora_mlp_reference
    from shardwright.kernels.grouped_lora_mlp.rows import Product, Rows
    from shardwright.kernels.permute.tiles import make_tiles
    from shardwright.kernels.verify import verify_case, verify_repeats
    from shardwright.schemas.errors import KernelError


@inside
@pytest.mark.parametrize("lora", [False, True])
def test_error_is_no_larger_than_eagers(lora: bool) -> None:
    """Experts without rows, a hot one, rows of nobody, no rows; fp32, bf16, poisoned memory, same bits."""
    suite = cases.LORA_SUITE if lora else cases.SUITE
    results = [
        result
        for shape in suite.small_shapes
        for dtype in (torch.float32, torch.bfloat16)
        for result in verify_case(suite, shape, dtype, "cpu")
    ]
    results.append(verify_repeats(suite, suite.small_shapes[0], torch.bfloat16, "cpu"))
    assert len(results) == 2 * len(suite.small_shapes) * (6 if lora else 2) + 1
    assert [result for result in results if not result.ok] == []


@inside
@pytest.mark.parametrize("order", ["out_in", "in_out"])
@pytest.mark.parametrize(
    ("kind", "interleaved"),
    [(kind, interleaved) for kind in ("swiglu", "clamped_swiglu", "situ") for interleaved in (False, True)]
    + [("relu2", False), ("silu", False)],
)
def test_activations_and_layouts(kind: Kind, interleaved: bool, order: str) -> None:
    """Output and dx in fp32 against fp64, every activation in every storage order."""
    activation = Activation(kind, (1.5, 1.7, 1.0))
    layout = Layout("in_out" if order == "in_out" else "out_in", interleaved)
    E, H, I = 3, 24, 40
    F = 2 * I if activation.gated else I
    generator = torch.Generator().manual_seed(5)
    x, gate_up, down = (torch.randn(s, generator=generator) for s in ((17, H), (E, F, H), (E, H, I)))
    if order == "in_out":
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    counts = torch.tensor([9, 0, 8])
    near, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y = grouped_lora_mlp(near, counts, gate_up, down, activation=activation, layout=layout)
    truth = grouped_lora_mlp_reference(exact, counts, gate_up.double(), down.double(), None, None, activation, layout)
    dy = torch.randn(y.shape, generator=generator)
    y.backward(dy)
    truth.backward(dy.double())
    assert near.grad is not None and exact.grad is not None
    for ours, right in ((y, truth), (near.grad, exact.grad)):
        assert float((ours.double() - right).norm() / right.norm()) < 2e-6


@inside
@pytest.mark.parametrize(("kernel", "large"), [("adapter gradient", 29), ("product", 29), ("shrink", 31)])
def test_sums_in_fp32_are_cut_into_chains(kernel: str, large: int) -> None:
    """One huge term, then ones: a single chain would round every later step away, 1,023 in all."""
    depth, wide = 1024, 2.0**large
    terms = torch.ones(depth)
    terms[0] = wide
    if kernel == "adapter gradient":
        rows, out = Rows(depth, make_tiles(torch.tensor([depth]), depth)), torch.empty(1, 16, 4)
        side = Side(terms[:, None].expand(depth, 16).contiguous(), torch.ones(depth, 4), False, out)
        launch_adapter_grad("", side, rows, None, 4, 1)
    else:
        rows, out = Rows(5, make_tiles(torch.tensor([5]), 5)), torch.empty(5, 16)
        x, w = terms.expand(5, depth).contiguous(), torch.ones(1, 16, depth)
        if kernel == "product":
            launch_product("", Product(x, w, True, rows), out)
        else:
            launch_shrink("", x, w, 1, depth, 1.0, rows, False, out)
    lost = wide + depth - 1 - out.double()
    assert float(lost.abs().max()) <= 256


@inside
def test_what_is_refused() -> None:
    x, gate_up, down = torch.ones(4, 16), torch.ones(2, 16, 16), torch.ones(2, 16, 8)
    counts = torch.tensor([2, 2])
    bad = {
        "kernel/dtype-mixed": (x.bfloat16(), counts, gate_up, down),
        "kernel/wrong-shape": (x, counts[:1], gate_up, down),
        "kernel/not-contiguous": (torch.ones(16, 4).mT, counts, gate_up, down),
        "kernel/misaligned-width": (torch.ones(4, 6), counts, torch.ones(2, 16, 6), torch.ones(2, 6, 8)),
        "kernel/trains-the-base": (x, counts, gate_up.clone().requires_grad_(), down),
    }
    learning = (x.clone().requires_grad_(), counts, gate_up, down.clone().requires_grad_())
    with pytest.raises(KernelError, match="wants a gradient"):
        grouped_lora_mlp(*learning)
    for code, arguments in bad.items():
        with pytest.raises(KernelError) as caught:
            grouped_lora_mlp(*arguments)
        assert caught.value.code == code
