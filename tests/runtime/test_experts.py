"""Experts across ranks (G1, D1, D3, D5) and their grouped products, alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.checkpoints.layouts import STANDARD, ExpertLayout
from shardwright.runtime.experts.balance import LoadMeter, max_over_mean
from shardwright.runtime.experts.grouped import GroupedLoraLinear
from shardwright.runtime.experts.module import LoraExperts
from shardwright.schemas.errors import LegalityError


def test_two_ranks_hold_route_and_differentiate_experts_rightly(
    tiny: Any, make_job: Any, strategy: Any, on_ranks: Any
) -> None:
    job = make_job(tiny, strategy(ep=2))
    out = on_ranks(2, "experts.py", str(job.plan_path), str(tiny.checkpoint))
    assert "rank 0 done" in out and "rank 1 done" in out


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    rank=st.integers(1, 3),
    in_out=st.booleans(),
    biased=st.booleans(),
    adapted=st.sampled_from(["no", "per_expert", "shared"]),
    seed=st.integers(0, 99),
)
def test_grouped_product_equals_dense_autograd(
    sizes: list[int], rank: int, in_out: bool, biased: bool, adapted: str, seed: int
) -> None:
    """fp64: values and all gradients of the plain formula with a merged weight, expert by expert (D13: empty too)."""
    experts, i, o, scaling = len(sizes), 6, 5, 0.7
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    x = normal(sum(sizes), i).requires_grad_()
    weight, bias = normal(experts, o, i), normal(experts, o) if biased else None
    lead = (experts,) if adapted == "per_expert" else ()
    a = normal(*lead, rank, i).requires_grad_() if adapted != "no" else None
    b = normal(*lead, o, rank).requires_grad_() if adapted != "no" else None
    stored = weight.mT.contiguous() if in_out else weight
    y = GroupedLoraLinear.apply(x, stored, bias, a, b, sizes, scaling, in_out)
    merged = weight + scaling * b @ a if a is not None and b is not None else weight
    pieces = [
        part @ merged[expert].T + (bias[expert] if bias is not None else 0)
        for expert, part in enumerate(x.split(sizes))
    ]
    expected = torch.cat(pieces)
    torch.testing.assert_close(y, expected)
    leaves = [leaf for leaf in (x, a, b) if leaf is not None]
    upstream = normal(*expected.shape)
    ours = torch.autograd.grad(y, leaves, upstream)
    theirs = torch.autograd.grad(expected, leaves, upstream)
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain)
    if adapted == "per_expert":
        for expert, size in enumerate(sizes):
            assert size or (bool((ours[1][expert] == 0).all()) and bool((ours[2][expert] == 0).all()))


def test_expanded_gradient_is_accepted() -> None:
    """``.sum()`` sends a gradient with stride 0."""
    x = torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(2, 5, 3)
    GroupedLoraLinear.apply(x, weight, None, None, None, [1, 3], 0.0, False).sum().backward()
    expected = torch.cat([weight[0].sum(0).expand(1, 3), weight[1].sum(0).expand(3, 3)])
    torch.testing.assert_close(x.grad, expected)


def test_experts_module_equals_transformers() -> None:
    """Mixtral's own experts, and Qwen3's, on one rank without adapters."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=8, intermediate_size=6, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    original = MixtralExperts(config)
    for parameter in original.parameters():
        nn.init.normal_(parameter)
    ours = LoraExperts(original, "experts", STANDARD, 1, 0, None, LoadMeter())
    for name, parameter in original.named_parameters():
        getattr(ours, name).data.copy_(parameter.detach())
    hidden = torch.randn(11, 8)
    scores, index = torch.randn(11, 4).softmax(-1).topk(2)
    torch.testing.assert_close(ours(hidden, index, scores), original(hidden, index, scores), rtol=1e-5, atol=1e-5)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in original.named_parameters()]


def test_unknown_call_and_indivisible_experts_are_refused() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(3, 4, 2))
            self.down_proj = nn.Parameter(torch.zeros(3, 2, 2))
            self.act_fn = nn.SiLU()

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    class Known(Other):
        def forward(  # type: ignore[override]
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            return hidden_states

    with pytest.raises(LegalityError, match="experts-call"):
        LoraExperts(Other(), "x", STANDARD, 1, 0, None, LoadMeter())
    with pytest.raises(LegalityError, match="experts-not-divisible"):
        LoraExperts(Known(), "x", ExpertLayout(), 2, 0, None, LoadMeter())


def test_meter_counts_only_while_recording() -> None:
    meter = LoadMeter()
    meter.add("a", torch.tensor([5, 5]))
    with meter.record():
        meter.add("a", torch.tensor([3, 1]))
        with meter.record(False):
            meter.add("a", torch.tensor([9, 9]))
        meter.add("a", torch.tensor([1, 1]))
    counts = meter.finish_step()
    assert counts["a"].tolist() == [4, 2] and meter.step == {}
    assert max_over_mean(counts) == pytest.approx(4 / 3)
    assert max_over_mean({}) == 0.0
