"""A recomputed MoE layer makes its down product again only where something after it is kept.

Runs itself again under TRITON_INTERPRET=1, which must be set before triton is imported.

Legend: T tokens, K experts a token, E experts, H hidden, I expert width, r rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="kernels need triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter's own process")


@pytest.mark.skipif(INTERPRETED, reason="is already inside")
def test_all_in_the_interpreter(interpret: Callable[[str], None]) -> None:
    interpret("../test_moe_recomputed.py")


if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

    from shardwright.kernels.grouped_lora_mlp import compute
    from shardwright.kernels.grouped_lora_mlp.op import Adapter
    from shardwright.kernels.moe_layer.op import moe_layer

T, K, E, H, I, RANK = 24, 2, 4, 32, 16, 8


def draw(*shape: int, seed: int) -> Tensor:
    return 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@inside
@pytest.mark.parametrize(("after", "products"), [(False, 1), (True, 2)])
def test_the_down_product_is_made_again_only_for_what_follows(
    after: bool, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients have the same bits with a checkpoint and without."""
    made = []
    product = compute.second_half
    monkeypatch.setattr(compute, "second_half", lambda *given: made.append(1) or product(*given))
    x, logits = draw(T, H, seed=1).requires_grad_(), draw(T, E, seed=2).requires_grad_()
    stacks = draw(E, 2 * I, H, seed=3), draw(E, H, I, seed=4)
    factors = [
        draw(*shape, seed=5 + n).requires_grad_()
        for n, shape in enumerate(((E, RANK, H), (E, 2 * I, RANK), (E, RANK, I), (E, H, RANK)))
    ]

    def layer(x: Tensor) -> Tensor:
        weights, experts = logits.softmax(-1).topk(K)
        adapters = {"up": Adapter(*factors[:2], 0.5), "low": Adapter(*factors[2:], 0.5)}
        y = x + moe_layer(x, experts, weights, *stacks, **adapters)
        return y * y.sigmoid() if after else y

    leaves = [x, logits, *factors]
    wanted = layer(x)
    gradients = torch.autograd.grad(wanted.square().sum(), leaves)
    made.clear()
    found = checkpoint(layer, x, use_reentrant=False)
    again = torch.autograd.grad(found.square().sum(), leaves)
    assert len(made) == products
    assert torch.equal(found, wanted)
    for ours, theirs in zip(again, gradients, strict=True):
        assert float(theirs.abs().max()) > 0 and torch.equal(ours, theirs)
