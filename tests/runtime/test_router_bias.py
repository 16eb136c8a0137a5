"""D20: a selection bias is frozen with the base: five steps leave every bit of it, and the adapter has none."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwright.runtime.export.peft import export_adapter

SIZES: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1, "max_position_embeddings": 128, "eos_token_id": 0,
}  # fmt: skip
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("balance", [{}, {"balance": {"sequence": "1"}}])
def test_the_bias_keeps_its_bits(
    balance: dict[str, Any],
    tiny: Any,
    make_job: Any,
    strategy: Any,
    single_rank: Any,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from shardwright.runtime import execute

    torch.manual_seed(4)
    model: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).float()
    model.get_buffer(BIAS).normal_(0.0, 0.3)
    model.save_pretrained(tmp_path / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.checkpoint / name, tmp_path / "checkpoint" / name)
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(tiny.data / name, tmp_path / name)
    example = type(tiny)(tmp_path / "checkpoint", tmp_path)
    lives: list[Any] = []
    original = execute.build

    def kept(*args: Any) -> Any:
        lives.append(original(*args))
        return lives[-1]

    monkeypatch.setattr(execute, "build", kept)
    job = make_job(example, strategy(), recipe=balance)
    assert single_rank(job) == 0 and len(job.losses) == 5
    assert all(check.passed for check in job.record.checks)
    assert bool(job.record.steps[0].balance_loss) is bool(balance)
    bias = lives[0].model.get_buffer(BIAS)
    assert bias.dtype == torch.float32 and torch.equal(bias, load_file(example.checkpoint / "model.safetensors")[BIAS])
    export_adapter(job.run_dir, example.checkpoint)
    assert not [key for key in load_file(job.run_dir / "adapter" / "adapter_model.safetensors") if "bias" in key]
