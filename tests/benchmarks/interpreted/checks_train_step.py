"""Tiny models of the training-step cases train with all their operators as without. Under TRITON_INTERPRET=1, fp32."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.kernels import interpreter

interpreter.install()
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from train_step_cases import KIMI_LINEAR_48B, QWEN3_30B, TINY, Case  # noqa: E402
from train_step_decisions import FUSIONS, WITHOUT  # noqa: E402
from train_step_ours import build_ours  # noqa: E402

from shardwright.kernels.grouped_lora_mlp import compute  # noqa: E402

TOKENS, VOCABULARY = 20, 128
KIMI = {
    **KIMI_LINEAR_48B,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "kda_layers": [1, 2],
        "head_dim": 64,
        "num_heads": 1,
        "short_conv_kernel_size": 4,
    },
}
"""A dense layer and one with experts under linear attention, one with experts under latent attention."""
CASES = {
    "qwen3-30b": Case("qwen3", "Qwen3MoeConfig", {**QWEN3_30B, **TINY, "head_dim": 32}, 1, True),
    "kimi-linear-48b": Case("kimi", "KimiLinearConfig", KIMI, 1, True),
}


@pytest.mark.parametrize("model", list(CASES))
def test_losses_and_gradients_are_those_without_operators(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1e-5 of the largest value of each gradient; one layer is not recomputed, and no down product of experts."""
    products: list[int] = []
    down = compute.second_half
    monkeypatch.setattr(compute, "second_half", lambda *given: products.append(1) or down(*given))
    sizes = {**CASES[model].config, "vocab_size": VOCABULARY}
    case = replace(CASES[model], config=sizes, sequence=TOKENS, dtype="float32", whole=1)
    names = tuple(name for name in FUSIONS if name not in WITHOUT[case.config_class])
    plain, fused = build_ours(case, ()), build_ours(case, names)
    assert plain.fused_modules == 0 and fused.fused_modules > len(names)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in plain.model.named_parameters():
            if name.endswith("lora_b"):
                value.normal_(0.0, 0.05, generator=generator)
    fused.model.load_state_dict(plain.model.state_dict())
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    losses: list[float] = []
    found: list[dict[str, Any]] = []
    for side in (plain, fused):
        loss = side.loss(ids)
        loss.backward()
        losses.append(float(loss.detach()))
        found.append(side.optimizer.gradients())
    assert len(products) == 2, "a down product for each of two layers"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert set(found[0]) == set(found[1]) and found[0]
    for name, wanted in found[0].items():
        assert float(wanted.abs().max()) > 0, name
        assert float((found[1][name] - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max()), name
