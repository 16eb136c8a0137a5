"""A row of the page of families is of the class that its checkpoint is built with, whichever model that is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import families_own
import families_page
import families_row
from k3_model import Slice

from shardwright.checkpoints.config import read_config
from shardwright.checkpoints.models import registry
from shardwright.checkpoints.models.kimi_k3.configuration import KimiK3Config
from shardwright.checkpoints.models.kimi_k3.model import KimiK3ForConditionalGeneration

LATENT_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 264, "index_n_heads": 4, "index_head_dim": 16,
    "index_topk": 4, "max_position_embeddings": 256,
}  # fmt: skip


class Other(KimiK3ForConditionalGeneration):
    """A second model of ours, in the registry for one test."""


@pytest.mark.parametrize("family", sorted(families_own.OWN))
def test_a_row_of_our_own_is_of_the_registrys_class(family: str, tmp_path: Path) -> None:
    row = families_row._profile(family, tmp_path)
    expected = registry.OWN_MODELS[read_config(tmp_path).model_type].model_class().__name__
    assert row["class"] == expected == "KimiK3ForConditionalGeneration" and row["profile"] == "exact", row


def test_another_class_in_the_registry_is_named_as_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stub:
        model_class = staticmethod(lambda: Other)
        config_class = staticmethod(lambda: KimiK3Config)

    monkeypatch.setitem(registry.OWN_MODELS, "kimi_k3", Stub())  # type: ignore[arg-type]
    assert families_row._profile("kimi_k3", tmp_path)["class"] == "Other"


def test_a_family_in_header_only_files_is_named_by_its_own_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of transformers written through the same door as ours: no part of the row is Kimi K3's."""
    monkeypatch.setitem(families_own.OWN, "glm", Slice("glm_moe_dsa", ("dsa+dense", "dsa", "dsa"), LATENT_SIZES))
    row = families_row._profile("glm", tmp_path)
    assert row["class"] == "GlmMoeDsaForCausalLM" and row["profile"] == "exact", row


@pytest.mark.parametrize("heads", [2, 8])
def test_parameters_are_counted_by_the_familys_own_heads(
    heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A_log holds a number a head and padding; the count is right for other numbers of heads than the two rows have."""
    sizes: dict[str, Any] = {**families_own.SIZES, "linear": {"num_heads": heads, "head_dim": 16}}
    monkeypatch.setitem(families_own.OWN, "wider", Slice("kimi_k3", ("kda+dense", "kda", "mla"), sizes))
    assert families_row._profile("wider", tmp_path)["profile"] == "exact"


def test_the_page_names_the_classes_that_rows_were_made_with() -> None:
    rows = [
        {"family": "kimi_k3", "class": "KimiK3ForConditionalGeneration"},
        {"family": "mixtral", "class": "MixtralForCausalLM"},
        {"family": "broken", "profile": "no"},
        {"family": "kimi_k3_gated_dsa", "class": "KimiK3ForConditionalGeneration"},
    ]
    assert families_page.own_classes(rows) == "KimiK3ForConditionalGeneration: kimi_k3, kimi_k3_gated_dsa"
    assert families_page.own_classes(rows[1:3]) == "none in this run"
