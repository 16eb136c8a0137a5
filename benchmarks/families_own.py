"""Families whose classes are this project's own, beside those of transformers: Kimi K3 in tiny sizes.

``kimi_k3`` has delta-rule and latent attention, ``kimi_k3_gated_dsa`` the sparse form in every other latent slot. Their
files are header-only in the published layout, experts packed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from k3_model import Slice, write_headers

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "routed_expert_hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts": 8, "num_experts_per_token": 2, "vocab_size": 264,
    "max_position_embeddings": 256, "attn_res_block_size": 2, "linear": {"num_heads": 4, "head_dim": 16},
}  # fmt: skip
INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}

OWN = {
    "kimi_k3": Slice("kimi_k3", ("kda+dense", "kda", "kda", "mla", "kda", "mla"), SIZES),
    "kimi_k3_gated_dsa": Slice("kimi_k3", ("kda+dense", "kda", "kda", "dsa", "kda", "mla"), {**SIZES, **INDEXER}),
}
"""Row of the page → its layers."""


def write(family: str, folder: Path) -> None:
    """The family's files."""
    write_headers(folder, OWN[family])


def parameters(model: nn.Module) -> int:
    """Parameters of a model; rows of A_log that belong to none of its layer's heads are padding, and not counted."""
    total = 0
    for name, value in model.named_parameters():
        module, _, own = name.rpartition(".")
        total += getattr(model.get_submodule(module), "heads", value.numel()) if own == "A_log" else value.numel()
    return total
