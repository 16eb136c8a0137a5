"""Public bug reports about MoE kernels as tests: what went wrong elsewhere must come out right here.

Runs itself again under TRITON_INTERPRET=1, which must be set before triton is imported. Where each reported
case is tested is a table in docs/kernels.md.

Legend: T tokens, K experts a token, E experts, R rows, H hidden, I expert width, r rank.
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
    interpret("../test_moe_cases.py")


if INTERPRETED:
    from shardwright.kernels import interpreter

    interpreter.install()

    from shardwright.kernels.grouped_lora_mlp.op import Adapter, grouped_lora_mlp
    from shardwright.kernels.moe_layer.op import moe_layer
    from shardwright.kernels.permute.op import combine, gather_rows, route
    from shardwright.kernels.verify import poisoned_memory

E, H, I, RANK = 6, 32, 16, 4


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stacks() -> tuple[torch.Tensor, torch.Tensor]:
    return draw(E, 2 * I, H, seed=1) * H**-0.5, draw(E, H, I, seed=2) * I**-0.5


def factors() -> list[torch.Tensor]:
    shapes = ((E, RANK, H), (E, 2 * I, RANK), (E, RANK, I), (E, H, RANK))
    return [(draw(*shape, seed=3 + at) * 0.3).requires_grad_() for at, shape in enumerate(shapes)]


def adapters(found: list[torch.Tensor]) -> tuple[Adapter, Adapter]:
    return Adapter(found[0], found[1], 0.5), Adapter(found[2], found[3], 0.5)


@inside
def test_c2_experts_without_rows_get_zero_gradients() -> None:
    """Counts in the proportions of the report; memory full of NaN before."""
    counts = torch.tensor([16, 0, 25, 4, 0, 8])
    learning = factors()
    up, low = adapters(learning)
    x = draw(int(counts.sum()), H, seed=9).requires_grad_()
    with poisoned_memory():
        y = grouped_lora_mlp(x, counts, *stacks(), up=up, low=low)
        found = torch.autograd.grad(y.sum(), learning)
    for gradient in found:
        assert gradient[[1, 4]].abs().sum() == 0 and gradient.isfinite().all()
        assert all(gradient[e].abs().sum() > 0 for e in (0, 2, 3, 5))


@inside
def test_c3_sentinel_slots_change_nothing() -> None:
    """16 slots, the last 8 sentinels with weight 0: the same bits as without them; finite router gradient."""
    ids = torch.rand((9, E), generator=torch.Generator().manual_seed(2)).argsort(-1)[:, :4].contiguous()
    wide = torch.cat([ids, torch.full((9, 12), -1)], 1)
    weights = torch.rand((9, 4), generator=torch.Generator().manual_seed(3))
    padded = torch.cat([weights, torch.zeros(9, 12)], 1).requires_grad_()
    x = draw(9, H, seed=4)
    with poisoned_memory():
        y = moe_layer(x, wide, padded, *stacks())
        (found,) = torch.autograd.grad(y, padded, draw(9, H, seed=5))
    assert torch.equal(y, moe_layer(x, ids, weights, *stacks()))
    assert found.isfinite().all() and found[:, 4:].abs().sum() == 0 and found[:, :4].abs().sum() > 0


@inside
@pytest.mark.parametrize("lora", [False, True])
def test_c4_every_expert_empty(lora: bool) -> None:
    """R rows that belong to nobody, and no rows at all: zeros, attached to the graph."""
    learning = factors() if lora else []
    up, low = adapters(learning) if lora else (None, None)
    for R in (0, 5):
        x = draw(R, H).requires_grad_()
        with poisoned_memory():
            y = grouped_lora_mlp(x, torch.zeros(E, dtype=torch.int64), *stacks(), up=up, low=low)
            found = torch.autograd.grad(y.sum(), [x, *learning])
        assert y.shape == (R, H) and y.requires_grad and y.abs().sum() == 0
        assert found[0].shape == (R, H) and all(gradient.abs().sum() == 0 for gradient in found)


@inside
def test_c9_a_rank_without_tokens_keeps_its_place_in_the_graph() -> None:
    """Zero tokens through permute, experts and combine: [0, H] out and in the backward, adapters get zeros."""
    learning = factors()
    up, low = adapters(learning)
    x = torch.zeros(0, H, requires_grad=True)
    weights = torch.zeros(0, 2, requires_grad=True)
    at = route(torch.zeros((0, 2), dtype=torch.int64), E)
    out = combine(grouped_lora_mlp(gather_rows(x, at), at.counts, *stacks(), up=up, low=low), at, weights)
    found = torch.autograd.grad(out.sum(), [x, weights, *learning])
    assert out.shape == (0, H) and found[0].shape == (0, H) and found[1].shape == (0, 2)
    assert all(gradient.abs().sum() == 0 for gradient in found)
    whole = moe_layer(x, torch.zeros((0, 2), dtype=torch.int64), weights, *stacks(), up=up, low=low)
    assert whole.requires_grad and torch.autograd.grad(whole.sum(), x)[0].shape == (0, H)


@inside
def test_c15_sixteen_rows_are_summed_in_fp32() -> None:
    """Top-16 in bf16 over 512 columns: rounded once; a bf16 running sum is more than twice as wrong."""
    ids = torch.arange(16).repeat(4, 1)
    at = route(ids, 16)
    y, weights = draw(64, 512, seed=6).bfloat16(), torch.rand((4, 16), generator=torch.Generator().manual_seed(7))
    rows, scale = y.double()[at.place.long()], weights.bfloat16().double()[..., None]
    exact = (rows * scale).sum(1)
    ours = combine(y, at, weights.bfloat16())
    running = torch.zeros(4, 512, dtype=torch.bfloat16)
    for slot in range(16):
        running += (rows[:, slot] * scale[:, slot]).bfloat16()
    near, far = (float((v.double() - exact).abs().max()) for v in (ours, running))
    assert near <= float(exact.abs().max()) * 2**-8 * 1.01 and far > 2 * near
    flipped = combine(y, route(ids.flip(1), 16), weights.bfloat16().flip(1))
    assert float((flipped.double() - exact).abs().max()) <= float(exact.abs().max()) * 2**-8 * 1.01


@inside
def test_c17_one_step_moves_every_adapter_and_no_frozen_bit() -> None:
    ids = torch.rand((24, E), generator=torch.Generator().manual_seed(8)).argsort(-1)[:, :3].contiguous()
    assert set(ids.flatten().tolist()) == set(range(E))
    base, learning = stacks(), factors()
    before = [tensor.detach().clone() for tensor in (*base, *learning)]
    up, low = adapters(learning)
    optimizer = torch.optim.SGD(learning, lr=0.1)
    y = moe_layer(draw(24, H, seed=10), ids, torch.rand(24, 3), *base, up=up, low=low)
    y.square().mean().backward()
    optimizer.step()
    assert all(torch.equal(now, then) for now, then in zip(base, before[:2], strict=True))
    for now, then in zip(learning, before[2:], strict=True):
        assert all(not torch.equal(now[e], then[e]) for e in range(E)), "every expert's factors moved"
