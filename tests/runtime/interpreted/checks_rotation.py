"""A rotation without norms that a plan installs in families' own attentions, in Triton's CPU interpreter, fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.kernels.registry import source_sha256
from shardwright.runtime.fuse import fusions_off, install_fusions
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision

B, S = 2, 9
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "attn_implementation": "sdpa",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "glm4_moe": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
    },
    "granitemoe": {"num_local_experts": 4},
}
"""Rotations of the whole head, of its first half (glm4_moe), and with a scale of its own (granitemoe)."""


def model_of(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SMALL, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def decision(**changes: Any) -> FusionDecision:
    fields: dict[str, Any] = {
        "proposal_id": "rope",
        "pattern": "rope",
        "variant": "kernel",
        "provider": "shardwright",
        "op": "qk_norm_rope",
        "modules": tuple(f"model.layers.{i}.self_attn" for i in range(2)),
        "roles": {name: name for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
        "constants": {"form": "pair", "pairing": "half"},
        "source_sha256": source_sha256("qk_norm_rope"),
        "tolerance": "0.0001",
    }
    return FusionDecision(**{**fields, **changes})


def outcome(model: Any) -> list[Tensor]:
    """Logits, and the gradients of one attention's projections."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, 60, (B, S), generator=generator)
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.backward(torch.randn(logits.shape, generator=generator))
    attention = model.model.layers[0].self_attn
    return [logits.detach(), *(p.weight.grad.clone() for p in (attention.q_proj, attention.k_proj, attention.v_proj))]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fused_equals_eager(family: str) -> None:
    model = model_of(family)
    before = outcome(model)
    switches = install_fusions(model, (decision(),))
    fused = outcome(model)
    with fusions_off(switches):
        again = outcome(model)
    for one, right, off in zip(fused, before, again, strict=True):
        scale = float(right.abs().max())
        assert torch.equal(off, right) and scale > 1e-3
        assert float((one - right).abs().max()) <= 2e-5 * scale
    assert len(switches) == 2


def test_it_is_the_operator_that_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    from shardwright.kernels.qk_norm_rope import op

    def noted(q: Tensor, k: Tensor, *tables: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        called.append(options)
        return torch.zeros_like(q), torch.zeros_like(k)

    monkeypatch.setattr(op, "qk_norm_rope", noted)
    model = model_of("mixtral")
    install_fusions(model, (decision(),))
    with torch.no_grad():
        model(input_ids=torch.ones(B, S, dtype=torch.long), use_cache=False)
    assert called == [{"width": 8, "pairing": "half"}] * 2


def test_an_attention_with_more_parts_is_refused() -> None:
    model = model_of("mixtral")
    model.model.layers[1].self_attn.add_module("q_norm", nn.RMSNorm(8))
    with pytest.raises(LegalityError, match="fusion-attention"):
        install_fusions(model, (decision(),))
