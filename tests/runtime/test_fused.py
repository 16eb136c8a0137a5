"""The fused operators on live models, in Triton's CPU interpreter, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwright.checkpoints.layouts import STANDARD, ExpertLayout
from shardwright.kernels.registry import OPERATORS, source_sha256
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.fused import whole_layer
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.fused_loss import LossHead, loss_head
from shardwright.runtime.fused_router import fused_router, weights_of
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.strategy import Mesh, ParallelStrategy

pytest.importorskip("triton", reason="kernels need triton")

LAYER = "model.layers.1.mlp"


def decision(op: str, modules: tuple[str, ...], hashed: bool = True, **fields: Any) -> FusionDecision:
    return FusionDecision(
        proposal_id=f"{op}.1",
        pattern=op,
        variant="fused",
        provider="shardwright",
        op=op,
        modules=modules,
        roles=fields.pop("roles", {}),
        source_sha256=source_sha256(op) if hashed else None,
        tolerance="0.0001",
        **fields,
    )


def experts_of(op: str) -> FusionDecision:
    return decision(op, (f"{LAYER}.experts",), constants={"activation": "swiglu"})


def router_of() -> FusionDecision:
    constants = {"k": 2, "scoring": "softmax", "renormalise": True}
    return decision("router", (f"{LAYER}.gate",), constants=constants)


def head() -> FusionDecision:
    return decision("linear_cross_entropy", ("lm_head",), roles={"weight": "weight"})


def attention() -> FusionDecision:
    modules = ("model.layers.0.self_attn", "model.layers.1.self_attn")
    return decision("qk_norm_rope", modules, constants={"eps": "0.000001"})


@pytest.fixture(scope="module")
def registered() -> None:
    """Operators that a plan can name; one that is not registered cannot be in a plan."""
    wanted = {"moe_layer", "grouped_lora_mlp", "router", "qk_norm_rope", "linear_cross_entropy"}
    if missing := sorted(wanted - set(OPERATORS)):
        pytest.skip(f"not registered: {', '.join(missing)}")


@pytest.mark.slow
def test_fused_equals_eager_on_live_models(
    qwen: Any, make_job: Any, strategy: Any, on_ranks: Any, registered: None
) -> None:
    """Whole layer, router, norms of heads, head and loss on one rank, with and without checkpointing, and on sequences
    cut over two; rows on two."""
    everything = (experts_of("moe_layer"), router_of(), attention(), head())
    one = [make_job(qwen, strategy(**axes), fusions=everything) for axes in ({}, {"checkpointing": "full"})]
    received = (experts_of("grouped_lora_mlp"), head())
    two = [make_job(qwen, strategy(ep=2, checkpointing="full"), fusions=received)]
    cut = ParallelStrategy(mesh=Mesh(cp=2), accumulation_steps=4)
    two.append(make_job(qwen, cut, fusions=everything))
    for ranks, jobs in ((1, one), (2, two)):
        out = on_ranks(ranks, "fused.py", str(qwen.checkpoint), *(str(job.plan_path) for job in jobs))
        assert out.count("loss") == ranks * len(jobs) and out.count("done") == ranks


class Family(nn.Module):
    """Two experts of a family with its own activation."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 4))
        self.down_proj = nn.Parameter(torch.zeros(2, 4, 4))
        self.act_fn = activation

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return hidden_states


def lora_experts(activation: nn.Module, layout: ExpertLayout = STANDARD, ep: int = 1) -> LoraExperts:
    return LoraExperts(Family(activation), "x", layout, ep, 0, None, LoadMeter())


@pytest.mark.parametrize(
    ("module", "constants", "said"),
    [
        (lambda: lora_experts(nn.GELU()), {}, "differs from the family's"),
        (lambda: lora_experts(nn.SiLU()), {"activation": "relu2"}, "activation is relu2"),
        (lambda: lora_experts(nn.SiLU()), {"activation": "tanh"}, "not one of"),
        (lambda: lora_experts(nn.SiLU(), ep=2), {}, "ep is 2"),
        (lambda: nn.Linear(2, 2), {}, "not run by this runtime's own experts"),
    ],
)
def test_experts_that_the_operator_does_not_compute_are_refused(module: Any, constants: Any, said: str) -> None:
    with pytest.raises(LegalityError, match=said):
        whole_layer(module(), "x", decision("moe_layer", ("x",), hashed=False, constants=constants))


def test_a_head_that_is_not_frozen_or_has_a_bias_is_refused() -> None:
    one = decision("linear_cross_entropy", ("head",), hashed=False)
    with pytest.raises(LegalityError, match="fusion-loss"):
        loss_head(nn.Linear(4, 6), "head", one)
    with pytest.raises(LegalityError, match="fusion-loss"):
        loss_head(nn.Linear(4, 6, bias=False), "head", one)
    frozen = nn.Linear(4, 6, bias=False).requires_grad_(False)
    with pytest.raises(LegalityError, match="fusion-loss"):
        loss_head(LoraLinear(frozen, 2, 1.0, 0.1, torch.float32), "head", one)


def test_a_model_that_works_on_its_logits_is_refused() -> None:
    """A soft cap after the head would be left out of the fused loss without a word."""
    head = LossHead(nn.Identity(), lambda hidden, *_, **__: hidden.sum(), nn.Identity(), "head")
    head.head.weight = torch.zeros(1)  # type: ignore[assignment]
    hidden = torch.ones(1, 2, 3)
    with head.with_labels(torch.zeros(1, 2, dtype=torch.long)):
        out = head(hidden)
    assert head.take(out) is out
    with head.with_labels(torch.zeros(1, 2, dtype=torch.long)):
        capped = torch.tanh(head(hidden))
    with pytest.raises(LegalityError, match="fusion-loss"):
        head.take(capped)
    assert head(hidden) is hidden


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_of_chosen_experts_equal_the_textbook(scoring: str, renormalise: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    scores = logits.softmax(-1) if scoring == "softmax" else 1 / (1 + torch.exp(-logits))
    picked, experts = scores.topk(3)
    expected = (picked / picked.sum(-1, keepdim=True) if renormalise else picked) * 2.5
    found = weights_of(logits.float(), experts, scoring, renormalise, 2.5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_router_without_its_numbers_is_refused() -> None:
    with pytest.raises(LegalityError, match="fusion-router"):
        fused_router(nn.Linear(4, 2), "gate", decision("router", ("gate",), hashed=False, constants={"k": 2}))
