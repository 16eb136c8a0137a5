"""Balancing losses: their value, their gradient on every mesh, and what is refused.

D15: the gradient changes, linearly in the coefficient. D16: it is the same for one data rank and for several.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from shardwright.runtime.experts.auxiliary import (
    STRONGEST,
    Balancer,
    balance_loss,
    require_something_upstream,
    router_of,
    strength,
)
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.runtime.lora.router import adapt_router
from shardwright.schemas.errors import LegalityError, RecipeError
from shardwright.schemas.recipe import BalanceSpec

BALANCE = {"auxiliary": "2", "sequence": "3", "target_load": "1.5"}


def routed(seed: int, T: int = 12, E: int = 4, K: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.randn(T, E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1)
    return scores, scores.topk(K).indices


def test_one_group_is_transformers_own_loss() -> None:
    """Up to its factor K: transformers' f adds up to K over the experts."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(3))
    index = logits.topk(2).indices
    theirs = load_balancing_loss_func((logits,), 4, 2)
    torch.testing.assert_close(2 * balance_loss(logits.softmax(-1), index, 1), theirs)


def test_groups_are_counted_apart_and_even_loads_give_one() -> None:
    scores, index = routed(1)
    parts = [balance_loss(s, i, 1) for s, i in zip(scores.split(4), index.split(4), strict=True)]
    torch.testing.assert_close(balance_loss(scores, index, 3), torch.stack(parts).mean())
    even = torch.full((8, 4), 0.25)
    assert float(balance_loss(even, torch.arange(16).view(8, 2) % 4, 1)) == pytest.approx(1.0)
    assert float(balance_loss(torch.eye(4)[[0] * 8], torch.zeros(8, 1, dtype=torch.long), 1)) == pytest.approx(4.0)


def test_the_measured_load_sets_the_strength() -> None:
    rows = torch.tensor([6, 2, 2, 2])
    assert strength(rows, 0.0) == strength(None, 2.0) == 1.0
    assert strength(rows, 2.0) == pytest.approx(1.0) and strength(rows, 3.0) == pytest.approx(0.5)
    assert strength(torch.tensor([4, 4, 4]), 2.0) == 0.0
    assert strength(torch.tensor([90, 0, 0, 0]), 1.1) == STRONGEST


def test_the_coefficient_follows_the_loads_of_the_steps_before() -> None:
    """Same tokens, same weights: a step's loss is its strength times the loss without a schedule."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))

    def loss(target: str, rows: list[int] | None) -> float:
        block, meter = Block(), LoadMeter()
        if rows is not None:
            meter.total["experts"] = torch.tensor(rows)
        spec = BalanceSpec.model_validate({"auxiliary": "1", "target_load": target})
        balancer = Balancer(block, ("experts",), spec, meter, share=1.0, sequence_tokens=8)
        with meter.record():
            block(x)
        taken = balancer.take()
        assert taken is not None
        return float(taken)

    plain = loss("0", [6, 2, 2, 2])
    assert plain > 0 and loss("2", None) == pytest.approx(plain), "before the first step nothing is measured"
    assert loss("3", [6, 2, 2, 2]) == pytest.approx(plain / 2)
    assert loss("2", [9, 1, 1, 1]) == pytest.approx(2 * plain)
    assert loss("2", [3, 3, 3, 3]) == 0.0


class Block(nn.Module):
    """A projection, a router and experts that give back what they get."""

    class Experts(nn.Module):
        def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return hidden * weights.sum(-1, keepdim=True)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(6, 6, bias=False)
        self.gate, self.experts = nn.Linear(6, 4, bias=False).requires_grad_(False), self.Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        scores, index = self.gate(hidden).softmax(-1).topk(2)
        return self.experts(hidden, index, scores.detach())


@pytest.mark.parametrize("spec", [{"auxiliary": "1"}, {"sequence": "1"}, {"auxiliary": "2", "sequence": "0.5"}])
def test_the_gradient_is_that_of_the_added_loss(spec: dict[str, str]) -> None:
    """D15. Against autograd on the formula written out, for coefficients one and two times as large."""
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(4))
    found = []
    for factor in (0.0, 1.0, 2.0):
        block = Block()
        changed = {key: str(float(value) * factor) for key, value in spec.items()}
        Balancer(block, ["experts"], BalanceSpec(**changed), LoadMeter(), share=0.5, sequence_tokens=5)
        block(x).square().sum().backward()
        found.append(block.before.weight.grad.clone())
    block = Block()
    hidden = block.before(x)
    P = block.gate(hidden).softmax(-1)
    index = P.topk(2).indices
    f = torch.nn.functional.one_hot(index, 4).float().sum(1)
    whole = 4 * (f.mean(0) / 2 * P.mean(0)).sum()
    parts = [4 * (f[a : a + 5].mean(0) / 2 * P[a : a + 5].mean(0)).sum() for a in (0, 5)]
    loss = 0.5 * (float(spec.get("auxiliary", 0)) * whole + float(spec.get("sequence", 0)) * sum(parts) / 2)
    (wanted,) = torch.autograd.grad(loss, block.before.weight)
    assert float(wanted.abs().max()) > 1e-4
    torch.testing.assert_close(found[1] - found[0], wanted, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found[2] - found[0], 2 * wanted, rtol=1e-3, atol=1e-5)


class Gate(nn.Module):
    """A router that is no linear, with the bias that some have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6), requires_grad=False)
        self.bias = nn.Parameter(torch.tensor([1.0, 0.0, -1.0, 0.5]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("kind", ["linear", "module"])
def test_an_adapted_router_learns_from_the_loss(kind: str) -> None:
    """Its scores are those of matrix, bias and adapter together; nothing else trains. Against autograd."""
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(4))
    block = Block().requires_grad_(False)
    if kind == "linear":
        block.gate = LoraLinear(block.gate, 2, 0.5, 0.0, torch.float32)
    else:
        block.gate = Gate()
        adapt_router(block.gate, "gate", 2, 0.5, torch.float32)
    gate: Any = block.gate
    for value in (gate.lora_a, gate.lora_b):
        nn.init.normal_(value)
    Balancer(block, ["experts"], BalanceSpec(auxiliary="1"), LoadMeter(), share=1.0, sequence_tokens=5)
    block(x).sum().backward()
    hidden = block.before(x)
    a, b = gate.lora_a.detach().requires_grad_(), gate.lora_b.detach().requires_grad_()
    merged = gate.weight + 0.5 * b @ a
    P = torch.nn.functional.linear(hidden, merged, gate.bias).softmax(-1)
    f = torch.nn.functional.one_hot(P.topk(2).indices, 4).float().sum(1).mean(0) / 2
    wanted = torch.autograd.grad(4 * (f * P.mean(0)).sum(), (a, b))
    assert all(float(value.abs().max()) > 1e-4 for value in wanted)
    torch.testing.assert_close((gate.lora_a.grad, gate.lora_b.grad), wanted, rtol=1e-4, atol=1e-6)


def test_a_run_balances_by_its_adapted_routers(tiny: Any, make_job: Any, strategy: Any, single_rank: Any) -> None:
    """The run's own check compares its gradient norm with the plain model's, whose routers are merged."""
    recipe = {
        "lora": {"targets": ["attention", "router"], "allow_router": True},
        "schedule": {"steps": 2},
        "optimizer": {"max_grad_norm": "0"},
    }
    norms = []
    for coefficient in ("0", "50"):
        job = make_job(tiny, strategy(), recipe={**recipe, "balance": {"auxiliary": coefficient}})
        assert single_rank(job) == 0
        norms.append(job.record.steps[0].grad_norm)
    assert norms[1] > 1.5 * norms[0]


def test_a_router_that_nothing_reaches_is_refused(tiny: Any) -> None:
    block = Block()
    with pytest.raises(RecipeError, match="balance-frozen-router"):
        require_something_upstream(block, ("experts",))
    block.experts.register_parameter("up_lora_a", nn.Parameter(torch.zeros(1)))
    with pytest.raises(RecipeError, match="balance-frozen-router"):
        require_something_upstream(block, ("experts",))
    block.before.register_parameter("lora_a", nn.Parameter(torch.zeros(1)))
    require_something_upstream(block, ("experts",))
    with pytest.raises(LegalityError, match="balance-router"):
        router_of(nn.Sequential(nn.Linear(2, 2)), "0")
    with pytest.raises(ValidationError, match="target_load"):
        BalanceSpec(target_load="0.5")


def test_every_mesh_gives_the_gradient_of_one_process(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any, run_many: Any
) -> None:
    """D16. Large coefficients, accumulation, ep 2, FSDP 2 and checkpointing; each run's own check holds its first
    gradient norm to plain transformers with the same losses in one process."""
    plain = make_job(tiny, strategy())
    one = make_job(tiny, strategy(), recipe={"balance": BALANCE})
    two = [
        make_job(tiny, strategy(**axes), recipe={"balance": BALANCE})
        for axes in ({"ep": 2, "checkpointing": "full"}, {"shard": 2})
    ]
    for job in (plain, one):
        assert single_rank(job) == 0
    run_many(2, two)
    assert abs(one.record.steps[0].grad_norm / plain.record.steps[0].grad_norm - 1) > 1e-3, "the losses count"
    assert all(step.balance_loss > 0 for step in one.record.steps) and not plain.record.steps[0].balance_loss
    for job in two:
        assert job.losses == pytest.approx(one.losses, rel=1e-5)
        for ours, theirs in zip(job.record.steps, one.record.steps, strict=True):
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
            assert ours.balance_loss == pytest.approx(theirs.balance_loss, rel=1e-5)
        assert all(check.passed for check in job.record.checks)
