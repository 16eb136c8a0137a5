"""How the published files name experts, as rules of transformers' own conversion.

Files hold each expert's gate (w1), up (w3) and down (w2); the model holds stacks, gate before up.
"""

from __future__ import annotations

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

EXPERTS = "block_sparse_moe.experts"


def register(model_type: str) -> None:
    """Let transformers' loading, saving and PEFT know the rules of this family."""
    rules = [
        WeightConverter(
            source_patterns=[f"{EXPERTS}.*.w1.weight", f"{EXPERTS}.*.w3.weight"],
            target_patterns=f"{EXPERTS}.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns=[f"{EXPERTS}.*.w2.weight"],
            target_patterns=f"{EXPERTS}.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]
    register_checkpoint_conversion_mapping(model_type, rules, overwrite=True)
