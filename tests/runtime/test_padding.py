"""Rows padded to the multiple that a plan names: where they lie, what they change (nothing), what they cost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.checkpoints.layouts import expert_layout
from shardwright.runtime.experts import fused
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.dispatch import Route, as_they_came, grouped, padded, plan_route, route_of
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.experts.rows import Moves
from shardwright.schemas.errors import LegalityError
from shardwright.search_spaces.cost.routing import routed_rows


@settings(max_examples=60, deadline=None)
@given(
    arriving=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4),
    multiple=st.integers(2, 9),
    one_local=st.booleans(),
)
def test_rows_lie_in_multiples_and_come_back(arriving: list[list[int]], multiple: int, one_local: bool) -> None:
    """Every received row in its own expert's part, in the order without padding, zeros behind; and back again."""
    counts = torch.tensor([row[:1] if one_local else row for row in arriving])
    nothing = torch.zeros(0, dtype=torch.int64)
    bare = route_of(Moves(nothing.view(0, 1)), counts.flatten(), counts, [[]], counts.tolist())
    route = padded(bare, multiple)
    total = int(counts.sum())
    rows = torch.arange(1.0, total + 1).unsqueeze(1).requires_grad_()
    there = grouped(rows, route)
    assert route.sizes == route.local_counts.tolist() and there.shape[0] == sum(route.sizes)
    parts = grouped(rows, bare).split(bare.sizes)
    for size, part, whole in zip(bare.sizes, parts, there.split(route.sizes), strict=True):
        assert len(whole) - size < multiple and len(whole) % multiple == 0
        assert torch.equal(whole[:size], part) and not bool(whole[size:].any())
    back = as_they_came(there * 3, route)
    assert torch.equal(back, rows * 3)
    back.backward(torch.arange(total).unsqueeze(1).float())
    assert rows.grad is not None and torch.equal(rows.grad, 3 * torch.arange(total).unsqueeze(1))


def gpt_oss(padding: int) -> LoraExperts:
    """Six experts with biases, clamped gates and adapters on both stacks, fp64."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=16, intermediate_size=8, num_local_experts=6, num_experts_per_tok=2)
    made = LoraExperts(GptOssExperts(config), "x", expert_layout("gpt_oss"), 1, 0, None, LoadMeter(), padding=padding)
    for stack, into, out in (("gate_up_proj", 16, 16), ("down_proj", 8, 16)):
        a, b = (nn.Parameter(torch.zeros(6, *shape)) for shape in ((2, into), (out, 2)))
        made.add_adapter(stack, a, b, 0.5)
    generator = torch.Generator().manual_seed(5)
    made.double()
    for parameter in made.parameters():
        parameter.data.normal_(0.0, 0.4, generator=generator)
    return made


def test_biases_of_padding_reach_nothing() -> None:
    """A row of zeros gets the biases; output and every gradient stay, that of the idle expert is exactly zero."""
    found = []
    for padding in (1, 8):
        experts = gpt_oss(padding)
        generator = torch.Generator().manual_seed(6)
        x = torch.randn(13, 16, generator=generator, dtype=torch.float64).requires_grad_()
        index = torch.randint(0, 5, (13, 2), generator=generator)
        weights = torch.rand(13, 2, generator=generator, dtype=torch.float64).requires_grad_()
        seen: list[list[int]] = []

        def products(rows: torch.Tensor, route: Route, own: Any = experts, seen: Any = seen) -> torch.Tensor:
            seen.append(route.sizes)
            return own.products(rows, route)

        out = experts.exchanged(x, index, weights, products)
        (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum().backward()
        assert all(size % padding == 0 for size in seen[0]) and seen[0][5] == 0 < min(seen[0][:5])
        adapters = {name: value.grad for name, value in experts.named_parameters() if "lora" in name}
        found.append([out.detach(), x.grad, weights.grad, *adapters.values()])
        assert all(grad is not None and not bool(grad[5].any()) for grad in adapters.values())
    for plain, wide in zip(*found, strict=True):
        assert plain is not None and float(plain.abs().max()) > 1e-3
        torch.testing.assert_close(wide, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padding", [8, 64])
def test_padded_rows_are_those_of_the_cost_model(padding: int) -> None:
    """Sixteen experts of about 1,024 rows: half a multiple each, the mean over 40 draws within 5 %."""
    tokens, top_k, experts = 4096, 4, 16
    more = []
    for seed in range(40):
        index = torch.randint(0, experts, (tokens, top_k), generator=torch.Generator().manual_seed(seed))
        route = padded(plan_route(index, experts, 1, None), padding)
        more.append(sum(route.sizes) - tokens * top_k)
    modelled = routed_rows(tokens, top_k, experts, 1, padding) - tokens * top_k
    assert sum(more) / len(more) == pytest.approx(modelled, rel=0.05)
    assert max(more) <= 2 * modelled + experts, "never more than a multiple but one an expert"


def test_an_operator_that_leaves_rows_where_they_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experts: Any = SimpleNamespace(ep=1, padding=16)
    monkeypatch.setattr(fused, "_bound", lambda module, name, decision: (experts, None, None))
    with pytest.raises(LegalityError, match="pads rows to 16"):
        fused.whole_layer(nn.Identity(), "x", SimpleNamespace())  # type: ignore[arg-type]
