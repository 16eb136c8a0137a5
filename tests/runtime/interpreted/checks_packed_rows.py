"""Experts on stacks that stay packed as one fused operator against the module's own products, interpreted, bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.checkpoints.layouts import expert_layout  # noqa: E402
from shardwright.kernels.packed_experts.cases import stack  # noqa: E402
from shardwright.kernels.registry import source_sha256  # noqa: E402
from shardwright.runtime.experts.balance import LoadMeter  # noqa: E402
from shardwright.runtime.experts.fused import packed_rows, received_rows  # noqa: E402
from shardwright.runtime.experts.module import LoraExperts  # noqa: E402
from shardwright.runtime.fuse import OPERATOR_FORWARDS, Switch, fusions_off  # noqa: E402
from shardwright.schemas.errors import LegalityError  # noqa: E402
from shardwright.schemas.fusion import FusionDecision  # noqa: E402

E, H, I, R, T, K = 4, 128, 64, 5, 9, 2
CLAMPED = {"activation": "clamped_swiglu", "alpha": "1.702", "limit": "7.0", "offset": "1.0"}


def gpt_oss_experts() -> LoraExperts:
    """Codes in place of stacks, columns interleaved, biases past the clamp, adapters on both stacks."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=K)
    with torch.device("meta"):
        family = GptOssExperts(config).to(torch.bfloat16)
    made = LoraExperts(family, "x", expert_layout("gpt_oss"), 1, 0, None, LoadMeter(), packing="mxfp4")
    generator = torch.Generator().manual_seed(5)
    for name, into, out in (("gate_up_proj", H, 2 * I), ("down_proj", I, H)):
        held = stack(E, out, into, "cpu", seed=out)
        for part, value in (
            ("values", held.values),
            ("scales", held.scales),
            ("bias", 3 * torch.randn(E, out, generator=generator)),
        ):
            value = value.bfloat16() if part == "bias" else value
            made.register_parameter(f"{name}_{part}", nn.Parameter(value, requires_grad=False))
        a, b = (torch.randn(size, generator=generator) * size[-1] ** -0.5 for size in ((E, R, into), (E, out, R)))
        made.add_adapter(name, nn.Parameter(a.bfloat16()), nn.Parameter(b.bfloat16()), 0.5)
    return made


def decision(op: str) -> FusionDecision:
    return FusionDecision(
        proposal_id="one",
        pattern="experts",
        variant="kernel-mxfp4",
        provider="shardwright",
        op=op,
        modules=("x",),
        roles={"gate_up_proj": "gate_up_proj", "down_proj": "down_proj"},
        constants=CLAMPED,
        source_sha256=source_sha256(op),
        tolerance="0.02",
    )


def run(experts: LoraExperts, forward: Any) -> list[Tensor]:
    """Output, gradient of the input and of the routing weights, and every adapter's gradient."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(T, H, generator=generator).bfloat16().requires_grad_()
    weights = torch.rand(T, K, generator=generator).bfloat16().requires_grad_()
    ids = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(T)])  # one expert gets no token
    adapters = [experts.get_parameter(f"{stack}_lora_{one}") for stack in experts.scalings for one in "ab"]
    out = forward(x, ids, weights)
    cotangent = torch.randn(out.shape, generator=generator).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, (x, weights, *adapters), cotangent)]


def apart(found: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, right, strict=True))


def test_codes_biases_and_adapters_are_the_modules_own_products() -> None:
    experts = gpt_oss_experts()
    switch = Switch(experts, "x", OPERATOR_FORWARDS["packed_experts"](experts, "x", decision("packed_experts")), 0.02)
    ours = run(experts, switch)
    with fusions_off((switch,)):
        theirs = run(experts, switch)
    assert len(ours) == len(theirs) == 7 and apart(ours, theirs) < 1e-2
    with torch.no_grad():
        experts.get_parameter("gate_up_proj_bias").zero_()
    assert apart(run(experts, experts.forward)[:1], theirs[:1]) > 0.1, "the biases matter here"
    assert apart(run(experts, switch), run(experts, experts.forward)) < 1e-2, (
        "the switch is on again, biases are read live"
    )


def test_a_plan_for_another_base_is_refused() -> None:
    """Packed operator and decoded stacks, and the other way round."""
    with pytest.raises(LegalityError, match="kept as mxfp4"):
        received_rows(gpt_oss_experts(), "x", decision("grouped_lora_mlp"))
    experts = gpt_oss_experts()
    experts.packing = None
    with pytest.raises(LegalityError, match="kept as numbers"):
        packed_rows(experts, "x", decision("packed_experts"))
