"""Experts that lie in other ways than in stacks of one module: adapted and equal to plain LoRA, or refused by name.

A module for each expert (code that a checkpoint brings), a stack in each linear (JetMoE); one matrix for all experts
(DBRX), single neurons (Doge) and stacks of different numbers (LongCat Flash) are refused when a plan is made.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoints.layouts import NOT_ADAPTED
from shardwright.checkpoints.targets import resolve_targets
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.module import check_call
from shardwright.runtime.lora.inject import inject
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.recipe import LoraSpec

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
JET = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8,
    "num_experts_per_tok": 2, "num_local_experts": 8, "intermediate_size": 24, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_module_for_each_expert_equals_plain(ranks: int, on_ranks: Any) -> None:
    """Idle experts have zeros on every rank, not nothing; ep is refused, for nothing can be shared out."""
    meshes: list[dict[str, int]] = [{}] if ranks == 1 else [{"shard": 2}, {"replicate": 2}, {"ep": 2}]
    lines = on_ranks(ranks, "separate.py", json.dumps(meshes)).splitlines()
    assert len([line for line in lines if "worst" in line]) == min(2, len(meshes)), lines
    assert ranks == 1 or lines[-1].endswith("refused legality/ep-needs-stacks")


@pytest.fixture(scope="module")
def jetmoe(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    import transformers

    out = tmp_path_factory.mktemp("jetmoe")
    torch.manual_seed(7)
    model = transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**JET))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.3)
    model.float().save_pretrained(out / "checkpoint")
    for file in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(tiny.data / file, out / file)
    return type(tiny)(out / "checkpoint", out)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stack_in_each_linear_equals_plain(
    ranks: int, jetmoe: Any, make_job: Any, strategy: Any, on_ranks: Any, tmp_path: Path
) -> None:
    meshes: list[dict[str, int]] = [{}] if ranks == 1 else [{"shard": 2}, {"replicate": 2}]
    jobs = []
    for experts in ("per_expert", "shared"):
        recipe = {
            "batch": {"global_batch_sequences": 8},
            "lora": {"rank": 2, "alpha": "4", "targets": ["experts"], "experts": experts},
        }
        for axes in meshes:
            planned = strategy(**axes, accumulation_steps=8 // ranks, checkpointing="full")
            job = make_job(jetmoe, planned, recipe=recipe)
            jobs.append((experts, str(job.plan_path), str(jetmoe.checkpoint)))
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    lines = [line for line in on_ranks(ranks, "families.py", str(path)).splitlines() if "worst" in line]
    assert len(lines) == len(jobs) and all("uneven 1" in line for line in lines), lines


def tiny_model(family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    import transformers

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from families_tiny import tiny_config  # type: ignore[import-not-found]

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager")


@pytest.mark.parametrize("family", sorted(NOT_ADAPTED))
def test_experts_that_cannot_be_adapted_are_refused_and_the_rest_is_not(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, monkeypatch)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    inside = next(name for name in shapes if ".experts." in name or "up_embed" in name)
    for target in ("experts", inside):
        with pytest.raises(LegalityError, match="experts-not-adapted") as caught:
            resolve_targets(shapes, LoraSpec(targets=("attention", target)), model_type=family)
        assert family in caught.value.what and target in caught.value.what and "attention" in caught.value.next_action
    targets = resolve_targets(shapes, LoraSpec(targets=("all-linear",)), model_type=family)
    assert targets and not any(one.role == "experts" for one in targets)
    ranks: Any = type("Ranks", (), {"sizes": type("Sizes", (), {"ep": 1}), "ep_rank": 0})
    meter = LoadMeter()
    inject(model, targets, model_type=family, ranks=ranks, meter=meter, dropout=0.0, dtype=torch.float32)


def test_stacks_of_different_numbers_are_refused_by_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("longcat_flash", monkeypatch)
    with pytest.raises(LegalityError, match="experts-unequal") as caught:
        check_call(model.model.layers[0].mlp.experts, "model.layers.0.mlp.experts")
    assert "12" in caught.value.what and "8" in caught.value.what
