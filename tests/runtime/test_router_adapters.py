"""Adapters on routers, which are frozen unless a recipe asks: the module's own forward, no merged matrix, export.

Their gradients over ranks (D10, D11, D12) are ``test_families.py::test_adapted_routers_equal_plain``.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.export.peft import export_adapter
from shardwright.runtime.lora.router import adapt_router
from shardwright.schemas.errors import LegalityError


def router(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    made = MixtralTopKRouter(MixtralConfig(num_local_experts=4, hidden_size=8, num_experts_per_tok=2))
    made.weight = nn.Parameter(torch.randn(4, 8).to(dtype), requires_grad=False)
    adapt_router(made, "gate", 2, 0.5, torch.float32)
    with torch.no_grad():
        made.lora_a.normal_()
        made.lora_b.normal_()
    return made


def test_the_modules_own_choice_is_made_of_adapted_logits() -> None:
    made, x = router(), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    weight = made.weight
    logits, scores, index = made(x)
    wanted = F.linear(x, weight + 0.5 * (made.lora_b @ made.lora_a))
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(index, logits.softmax(-1).topk(2).indices) and made.weight is weight
    (logits.square().sum() + scores.square().sum()).backward()
    plain_a, plain_b = (one.detach().clone().requires_grad_() for one in (made.lora_a, made.lora_b))
    again = F.linear(x, weight + 0.5 * (plain_b @ plain_a))
    kept = again.softmax(-1).gather(1, index)
    (again.square().sum() + (kept / kept.sum(-1, keepdim=True)).square().sum()).backward()
    for ours, theirs in ((made.lora_a.grad, plain_a.grad), (made.lora_b.grad, plain_b.grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert weight.grad is None


def test_nothing_is_rounded_to_the_matrix() -> None:
    """A change below the spacing of bf16 at 1 would be lost in a merged matrix; it reaches the logits."""
    made = router(torch.bfloat16)
    with torch.no_grad():
        made.weight.fill_(1.0)
        made.lora_a.fill_(2.0**-6)
        made.lora_b.fill_(2.0**-6)
    change = 0.5 * 2 * 2.0**-12
    assert torch.equal((made.weight + change).bfloat16(), made.weight)
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 64, -64
    with torch.no_grad():
        made.lora_a[:, 1] = 0
    assert made(x)[0].tolist() == [[64 * change] * 4]


class Multiplies(nn.Module):
    """Uses its matrix in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_an_adapter_is_never_passed_by() -> None:
    made = Multiplies()
    weight = made.weight
    adapt_router(made, "layers.0.gate", 2, 1.0, torch.float32)
    with pytest.raises(LegalityError, match=r"router-adapter.*layers\.0\.gate"):
        made(torch.ones(2, 8))
    assert made.weight is weight, "as it was, after a failure too"
    with pytest.raises(LegalityError, match="has no matrix named weight"):
        adapt_router(nn.Sequential(), "gate", 2, 1.0, torch.float32)


def test_runs_on_meshes_are_equal_and_export(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any, run_many: Any
) -> None:
    """Three steps: the second would be NaN or another one if a rank's gradient held its own rows alone (D11)."""
    recipe = {
        "lora": {"targets": ["attention", "experts", "router"], "allow_router": True},
        "schedule": {"steps": 3, "held_out_sequences": 2},
    }
    one = make_job(tiny, strategy(), recipe=recipe)
    two = make_job(tiny, strategy(ep=2, checkpointing="full"), recipe=recipe)
    assert single_rank(one) == 0
    run_many(2, [two])
    assert two.losses == pytest.approx(one.losses, rel=1e-5) and all(map(math.isfinite, two.losses))
    for ours, theirs in zip(two.record.steps, one.record.steps, strict=True):
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    assert all(check.passed for check in two.record.checks)
    export_adapter(two.run_dir, tiny.checkpoint)
    results = check_adapter(two.run_dir, tiny.checkpoint)
    assert results and all(result.passed for result in results), results
    config = json.loads((two.run_dir / "adapter" / "adapter_config.json").read_text())
    assert "model.layers.0.mlp.gate.weight" in config["target_parameters"]
