"""Kimi K3 under activation checkpointing: a recomputed layer looks at the tokens and experts of its forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoints.models.kimi_k3.configuration import KimiK3TextConfig
from shardwright.checkpoints.models.kimi_k3.model import KimiK3ForCausalLM
from shardwright.runtime.checkpointing import checkpoint_layers
from shardwright.runtime.experts.balance import LoadMeter

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "index_n_heads": 16,
    "index_head_dim": 6,
    "index_topk": 4,
    "attn_res_block_size": 2,
    "linear_attn_config": {"num_heads": 3, "head_dim": 8, "full_attn_layers": [2, 3], "sparse_attn_layers": [2]},
}


def gradients(model: KimiK3ForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids).logits.square().sum().backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def test_recomputation_changes_no_gradient() -> None:
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(KimiK3TextConfig(**SIZES)).double()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.3)
    ids = torch.randint(0, 64, (2, 12))
    plain = gradients(model, ids)
    checkpoint_layers(list(model.model.layers), LoadMeter())
    again = gradients(model, ids)
    assert plain.keys() == again.keys() and not any("indexer" in name for name in plain)
    for name, value in plain.items():
        assert torch.equal(value, again[name]), name


def test_a_recomputation_takes_the_tokens_of_its_forward() -> None:
    """The indexer turned round between the two passes: the gradient is that of the forward's choice."""
    torch.manual_seed(1)
    model = KimiK3ForCausalLM(KimiK3TextConfig(**SIZES)).double()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.3)
    ids = torch.randint(0, 64, (1, 12))
    plain = gradients(model, ids)
    checkpoint_layers(list(model.model.layers), LoadMeter())
    model.zero_grad()
    loss = model(ids).logits.square().sum()
    with torch.no_grad():
        model.model.layers[1].self_attn.indexer.wk.weight.neg_()
    loss.backward()
    for name, value in plain.items():
        found = dict(model.named_parameters())[name].grad
        assert found is not None and torch.equal(value, found), name


def test_a_recomputed_layer_keeps_its_input_and_no_copy_of_a_snapshot() -> None:
    """What stands between forward and backward grows by one row a layer, however many snapshots the layer reads."""
    tokens, kept = 512, {}
    for layers in (9, 17):
        full = [at for at in range(1, layers + 1) if at % 4 == 0]
        linear = {"num_heads": 3, "head_dim": 8, "full_attn_layers": full, "sparse_attn_layers": []}
        sizes = {**SIZES, "num_hidden_layers": layers, "linear_attn_config": linear, "first_k_dense_replace": layers}
        model = KimiK3ForCausalLM(KimiK3TextConfig(**sizes))
        checkpoint_layers(list(model.model.layers), LoadMeter())
        embedded = torch.randn(1, tokens, SIZES["hidden_size"], requires_grad=True)
        storages: dict[int, int] = {}

        def seen(module: torch.nn.Module, args: tuple[Any, ...], found: dict[int, int] = storages) -> None:
            found.update(
                {a.untyped_storage().data_ptr(): a.untyped_storage().nbytes() for a in args if isinstance(a, Tensor)}
            )

        held = [layer.register_forward_pre_hook(seen) for layer in model.model.layers]
        loss = model(inputs_embeds=embedded).logits.sum()
        kept[layers] = sum(storages.values())
        assert len(held) == layers and loss.requires_grad
    assert kept[17] - kept[9] == 8 * tokens * SIZES["hidden_size"] * 4
