"""Side tensors that files and the model's class keep in fp32 stay so in bf16 runs, as ``from_pretrained`` does it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.runtime.reference import load_plain

K3 = Path(__file__).resolve().parents[2] / "examples" / "tiny-k3"
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "intermediate_size": 48,
}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", {**SMALL, **MLA, **GROUPS, "num_hidden_layers": 3}),
    "glm4_moe": ("Glm4Moe", {**SMALL, **GROUPS, "head_dim": 8, "num_hidden_layers": 3}),
    "nemotron_h": (
        "NemotronH",
        {
            **SMALL,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
            "moe_shared_expert_intermediate_size": 16,
            "moe_latent_size": 16,
            "layers_block_type": ["attention", "moe", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "conv_kernel": 4,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **{
                key: SMALL[key]
                for key in SMALL
                if key not in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok")
            },
            **MLA,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "q_lora_rank": None,
            "num_hidden_layers": 2,
            "linear_attn_config": {
                "kda_layers": [1],
                "full_attn_layers": [2],
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            },
        },
    ),
}
WIDE = re.compile(r"e_score_correction_bias|A_log|dt_bias")
"""Stored in fp32; all else in bf16, the routers' weights too, which the classes list."""


def published(family: str, out: Path) -> Any:
    """A checkpoint in bf16 with fp32 side tensors whose values bf16 cannot hold."""
    name, sizes = FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, value in (*model.named_parameters(), *model.named_buffers()):
            if WIDE.search(key):
                value.copy_(torch.rand(value.shape) * 0.1 + 0.3)
            elif value.is_floating_point():
                value.data = value.data.bfloat16()
    model.save_pretrained(out)
    return type(model)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_bf16_model_is_the_librarys(family: str, tmp_path: Path) -> None:
    """Formats of side tensors, every value, and logits to the last bit."""
    theirs = published(family, tmp_path).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="sdpa")
    ours, _ = load_plain(tmp_path, torch.bfloat16, torch.device("cpu"))
    wide = []
    expected = dict((*theirs.named_parameters(), *theirs.named_buffers()))
    for name, value in (*ours.named_parameters(), *ours.named_buffers()):
        assert torch.equal(value.float(), expected[name].float()), name
        if WIDE.search(name):
            assert value.dtype == expected[name].dtype, name
            wide += [name] if value.dtype == torch.float32 else []
    assert wide and any(not torch.equal(expected[name], expected[name].bfloat16().float()) for name in wide)
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, theirs.eval()(input_ids=ids).logits)
    parameters = dict(ours.named_parameters())
    kept = sum(parameters[name].numel() for name in wide if name in parameters)
    assert profile_checkpoint(tmp_path).parameters.kept_float32 == kept


def test_side_tensors_of_a_sharded_bf16_run_keep_their_bits(
    tiny: Any, make_job: Any, strategy: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Whole on every rank, and in the memory model; the loss is the plain bf16 model's."""
    subprocess.run([sys.executable, str(K3 / "build.py"), "--out", str(tmp_path / "k3")], check=True)
    example = type(tiny)(tmp_path / "k3" / "checkpoint", tmp_path / "k3")
    job = make_job(example, strategy(shard=2), recipe={"precision": {"base": "bfloat16"}})
    found = json.loads(on_ranks(2, "precision.py", str(job.plan_path), str(example.checkpoint)))
    pads = found["wide"] - 4 * profile_checkpoint(example.checkpoint).parameters.kept_float32
    assert found["kept"] == 18 and pads == 3 * 4 * (128 - 3), "A_log is padded to 128 for three heads"
    assert found["held"] - pads == pytest.approx(found["predicted"], rel=0.02), found
