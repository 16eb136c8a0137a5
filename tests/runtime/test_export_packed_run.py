"""A run on an MXFP4 base, merged and packed again: what is left of the trained change is told, and is true."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.checkpoints.packing import mxfp4_codec
from shardwright.runtime.checks.export_forms import check_merged
from shardwright.runtime.export.merged import export_merged
from shardwright.runtime.reference import load_plain

EXPERTS = ".experts."


@pytest.fixture(scope="module")
def packed_run(tiny: Any, make_job: Any, strategy: Any, single_rank: Any, tmp_path_factory: Any) -> Any:
    """A trained run on a Mixtral whose experts are MXFP4, with a large learning rate so that changes show."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        eos_token_id=0,
    )
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("mxfp4")
    checkpoint = folder / "checkpoint"
    MixtralForCausalLM(config).float().save_pretrained(checkpoint)
    stored = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if EXPERTS in name:
            stored[f"{name}_packed"], stored[f"{name}_scale"] = mxfp4_codec.encode(weight)
        else:
            stored[name] = weight
    save_file({name: value.contiguous() for name, value in stored.items()}, checkpoint / "model.safetensors")
    said = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(
        json.dumps({**said, "quantization_config": {"quant_method": "compressed-tensors"}})
    )
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.checkpoint / file, checkpoint / file)
    for file in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(tiny.data / file, folder / file)
    recipe = {"lora": {"targets": ["experts"]}, "optimizer": {"learning_rate": "0.05"}}
    job = make_job(type(tiny)(checkpoint, folder), strategy(), recipe=recipe)
    assert single_rank(job) == 0
    return job


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().float() for name, value in model.named_parameters()}


def test_the_retained_change_of_an_mxfp4_base_is_measured_and_told(packed_run: Any) -> None:
    checkpoint = packed_run.example.checkpoint
    facts, warnings = export_merged(packed_run.run_dir, checkpoint)
    assert facts.retained_delta is not None and 0 < facts.retained_delta < 1.2
    assert bool(warnings) == (facts.retained_delta < 0.9)
    assert [one.retained_delta for one in packed_run.record.exports] == [facts.retained_delta]
    shutil.copy(packed_run.plan_path, packed_run.run_dir / "plan.json")
    assert all(check.passed for check in check_merged(packed_run.run_dir, checkpoint))

    base = load_file(checkpoint / "model.safetensors")
    merged = load_file(packed_run.run_dir / "merged" / "model.safetensors")
    assert base.keys() == merged.keys()
    changed = {name for name in base if not torch.equal(base[name].view(torch.uint8), merged[name].view(torch.uint8))}
    assert changed and all(EXPERTS in name and name.endswith(("_packed", "_scale")) for name in changed)


def test_the_number_is_what_a_loader_of_both_checkpoints_sees(packed_run: Any) -> None:
    """Share along the trained change s · B A, from decoded weights alone: the smallest over the published weights."""
    from shardwright.runtime import state
    from shardwright.runtime.lora.inject import adapter_names

    facts, _ = export_merged(packed_run.run_dir, packed_run.example.checkpoint)
    folders = (packed_run.example.checkpoint, packed_run.run_dir / "merged")
    before, after = (values(load_plain(folder, torch.float32, torch.device("cpu"))[0]) for folder in folders)
    adapters = state.read_adapters(state.final(packed_run.run_dir, packed_run.plan))
    shares = []
    for target in packed_run.plan.decision.lora_targets:
        a, b = (adapters[name].float() for name in adapter_names(target))
        change = float(target.scaling) * (b @ a)
        moved = after[target.parameter] - before[target.parameter]
        halves = 2 if "gate_up" in target.parameter else 1  # published as two weights an expert
        for expert in range(change.shape[0]):
            pairs = zip(moved[expert].chunk(halves), change[expert].chunk(halves), strict=True)
            shares += [float((m * d).sum() / d.square().sum()) for m, d in pairs]
    assert facts.retained_delta == pytest.approx(min(shares), rel=2e-2)
