"""Experts with biases as one fused operator against the family's own products, in Triton's CPU interpreter (fp32)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.checkpoints.layouts import expert_layout
from shardwright.kernels.registry import source_sha256
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.fused import received_rows, whole_layer
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.lora.shared import SharedPairs
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision

E, H, I, R, T, K = 6, 32, 16, 16, 11, 2
CLAMPED = {"activation": "clamped_swiglu", "alpha": "1.702", "limit": "7.0", "offset": "1.0"}


def gpt_oss_experts(shared: bool = False) -> LoraExperts:
    """Stacks [E, in, out], gate and up interleaved, biases, and adapters on both stacks; random values."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K)
    family = GptOssExperts(config)
    made = LoraExperts(family, "x", expert_layout("gpt_oss"), 1, 0, None, LoadMeter())
    generator = torch.Generator().manual_seed(5)
    pairs = SharedPairs()
    for stack, into, out in (("gate_up_proj", H, 2 * I), ("down_proj", I, H)):
        lead = () if shared else (E,)
        a, b = (nn.Parameter(torch.zeros(*lead, *shape)) for shape in ((R, into), (out, R)))
        if shared:
            pairs.add(stack, a, b)
            made.share_adapter(stack, pairs, 0.5)
        else:
            made.add_adapter(stack, a, b, 0.5)
    with torch.no_grad():
        for parameter in (*made.parameters(), *pairs.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def decision(op: str) -> FusionDecision:
    return FusionDecision(
        proposal_id="one",
        pattern="experts",
        variant="kernel",
        provider="shardwright",
        op=op,
        modules=("x",),
        roles={},
        constants=CLAMPED,
        source_sha256=source_sha256(op),
        tolerance="0.0001",
    )


def run(experts: LoraExperts, forward: Any) -> list[Tensor]:
    """Output, gradient of the input and of the routing weights, and every adapter's gradient."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(T, H, generator=generator).requires_grad_()
    weights = torch.rand(T, K, generator=generator).requires_grad_()
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(T)])  # one expert gets no token
    owners = [(stack, experts.shared.get(stack, experts)) for stack in experts.scalings]
    adapters = [owner.get_parameter(f"{stack}_lora_{one}") for stack, owner in owners for one in "ab"]
    for value in adapters:
        value.grad = None
    out = forward(x, ids, weights)
    (out * torch.randn(out.shape, generator=generator)).sum().backward()
    found = [out.detach(), x.grad, weights.grad, *(value.grad for value in adapters)]
    return [one.clone() for one in found if one is not None]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("maker", [whole_layer, received_rows])
def test_biases_are_added(maker: Any, shared: bool) -> None:
    """With a pair for each expert, and with one for all."""
    experts = gpt_oss_experts(shared)
    op = "moe_layer" if maker is whole_layer else "grouped_lora_mlp"
    theirs = run(experts, experts.forward)
    ours = run(experts, maker(experts, "x", decision(op)))
    assert len(ours) == len(theirs) == 7
    for found, right in zip(ours, theirs, strict=True):
        scale = float(right.abs().max())
        assert scale > 1e-3 and float((found - right).abs().max()) <= 2e-5 * scale
    with torch.no_grad():
        experts.gate_up_proj_bias.zero_()  # type: ignore[union-attr,operator]
    assert float((run(experts, experts.forward)[0] - theirs[0]).abs().max()) > 1e-2, "the biases matter here"


def test_padded_rows_change_nothing() -> None:
    """The operator between dispatch and combine gets multiples of 8 rows; the zeros between get biases, and no say."""
    experts = gpt_oss_experts()
    theirs = run(experts, experts.forward)
    experts.padding = 8
    ours = run(experts, received_rows(experts, "x", decision("grouped_lora_mlp")))
    for found, right in zip(ours, theirs, strict=True):
        assert float((found - right).abs().max()) <= 2e-5 * float(right.abs().max())
    with pytest.raises(LegalityError, match="pads rows to 8"):
        whole_layer(experts, "x", decision("moe_layer"))
