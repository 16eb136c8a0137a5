"""Fused norms and routers in families' own modules against those modules, in Triton's CPU interpreter (fp32).

Each family's model is its transformers class at a small size; the decision binds the roles that a plan would.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.kernels.registry import source_sha256
from shardwright.runtime.fuse import fusions_off, install_fusions
from shardwright.runtime.fused_router import fused_router
from shardwright.runtime.routing import Choices, choosing
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
LINEAR = {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4, "full_attn_layers": [2], "kda_layers": [1]}
NORMS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3Next",
        {
            **SMALL,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "model.layers.0.linear_attn.norm",
        {"act": "silu", "form": "rounded"},
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "linear_attn_config": LINEAR,
        },
        "model.layers.0.self_attn.o_norm",
        {"act": "sigmoid", "form": "wide"},
    ),
}
SOFTMAX: dict[str, Any] = {"k": 2, "scoring": "softmax", "renormalise": True}
SIGMOID: dict[str, Any] = {"k": 2, "scoring": "sigmoid", "renormalise": True}
ARGUMENT = {**SIGMOID, "bias_argument": True, "weights_dtype": "float32"}
EXPERTS = {"num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 2}
ROUTERS: dict[str, tuple[str, str, dict[str, Any], dict[str, str], dict[str, Any]]] = {
    "gpt_oss": ("GptOss", "TopKRouter", {**EXPERTS}, {"weight": "weight", "offset": "bias"}, SOFTMAX),
    "minimax_m2": ("MiniMaxM2", "TopKRouter", {**EXPERTS}, {"weight": "weight"}, ARGUMENT),
    "hy_v3": (
        "HYV3",
        "TopKRouter",
        {**EXPERTS, "router_scaling_factor": 2.5},
        {"weight": "weight"},
        {**ARGUMENT, "logits_dtype": "float32", "scale": "2.5"},
    ),
    "afmoe": (
        "Afmoe",
        "TokenChoiceRouter",
        {**EXPERTS, "route_scale": 1.5},
        {"weight": "gate.weight"},
        {**ARGUMENT, "logits_cast": "float32", "scale": "1.5"},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        "Gate",
        {**EXPERTS, "moe_topk": 2},
        {"weight": "wg.weight"},
        {**SOFTMAX, "logits_dtype": "float32"},
    ),
}


def decision(op: str, modules: tuple[str, ...], roles: dict[str, str], constants: dict[str, Any]) -> FusionDecision:
    return FusionDecision(
        proposal_id=f"{op}.1",
        pattern=op,
        variant="kernel",
        provider="shardwright",
        op=op,
        modules=modules,
        roles=roles,
        constants=constants,
        source_sha256=source_sha256(op),
        tolerance="0.0001",
    )


@pytest.mark.parametrize("family", sorted(NORMS))
def test_a_gated_norm_on_a_live_model(family: str) -> None:
    import transformers

    prefix, sizes, where, constants = NORMS[family]
    torch.manual_seed(2)
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        model.get_submodule(where).weight.uniform_(0.5, 1.5)
    eps = format(model.get_submodule(where).variance_epsilon, "f")
    constants = {**constants, "eps": eps}
    switches = install_fusions(model, (decision("gated_rms_norm", (where,), {"weight": "weight"}, constants),))
    ids = torch.arange(9).reshape(1, 9) * 11 % 96

    def run() -> tuple[Tensor, Tensor, Tensor]:
        model.zero_grad()
        seen = model(input_ids=ids, use_cache=False).logits
        seen.square().mean().backward()
        return seen.detach(), model.get_submodule(where).weight.grad, model.get_input_embeddings().weight.grad

    fused = [value.clone() for value in run()]
    with fusions_off(switches):
        plain = run()
    for ours, theirs in zip(fused, plain, strict=True):
        scale = float(theirs.abs().max())
        assert scale > 0
        assert float((ours - theirs).abs().max()) <= 2e-5 * scale


@pytest.mark.parametrize("family", sorted(ROUTERS))
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_router_on_its_familys_module(family: str, checkpointed: bool) -> None:
    module, bias, wanted = router(family)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3))
    x = x.flatten(0, 1) if family == "gpt_oss" else x
    constants = ROUTERS[family][4]
    fused = fused_router(module, family, decision("router", ("gate",), ROUTERS[family][3], constants))
    extra = (bias,) if constants.get("bias_argument") else ()

    def run(forward: Any) -> tuple[Tensor, ...]:
        module.zero_grad()
        here = x.clone().requires_grad_()
        logits, weights, experts = forward(here, *extra)
        dense = torch.zeros(10, 6).scatter(1, experts, weights.float())
        (dense.square().sum() + dense[:, 0].sum()).backward()
        gradient = module.get_parameter(wanted).grad
        assert here.grad is not None and gradient is not None
        return logits.float().detach(), dense.detach(), here.grad, gradient.clone()

    theirs = run(module.forward)
    if checkpointed:
        with choosing(Choices()):
            ours = run(fused)
    else:
        ours = run(fused)
    for found, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, right, rtol=2e-5, atol=2e-6)
    assert float(theirs[2].abs().max()) > 1e-3


def router(family: str) -> tuple[nn.Module, Tensor, str]:
    """A family's router with random values, a bias that changes its choice, and the name of its matrix."""
    import importlib

    import transformers

    prefix, ending, sizes, roles, _ = ROUTERS[family]
    config = getattr(transformers, f"{prefix}Config")(hidden_size=32, **sizes)
    here = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = "HunYuanMoEV1Gate" if ending == "Gate" else f"{prefix}{ending}"
    module: nn.Module = getattr(here, own)(config, **({"layer_idx": 0} if ending == "Gate" else {}))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.float(), torch.randn(6, generator=generator), roles["weight"]


def test_the_bias_that_comes_as_an_argument_picks() -> None:
    module, bias, _ = router("minimax_m2")
    fused = fused_router(module, "gate", decision("router", ("gate",), {"weight": "weight"}, ARGUMENT))
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(8))
    changed = fused(x, e_score_correction_bias=bias)[2] != fused(x, torch.zeros(6))[2]
    assert bool(changed.any())
    with pytest.raises(LegalityError, match="fusion-router"):
        fused(x)
