"""Packed checkpoints: decoded at load, or kept packed as the plan says; both train the same function."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardwright.checkpoints.packing import fp8_block, int4_group, mxfp4_codec
from shardwright.checkpoints.reader import ShardReader
from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.checks.export_forms import check_merged
from shardwright.runtime.experts.packed import packed_experts_of
from shardwright.runtime.export.merged import export_merged
from shardwright.runtime.export.peft import export_adapter
from shardwright.runtime.files import open_files
from shardwright.runtime.load.decode import decoded, read_base
from shardwright.schemas.errors import LegalityError

COMMON: dict[str, Any] = {
    "vocab_size": 264,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}
WIDTH = {"mxfp4": 64, "fp8": 128, "int4": 64, "blocks": 64}
Pack = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


def pack_mxfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if ".experts." not in name:
        return {name: weight}
    packed, scale = mxfp4_codec.encode(weight)
    return {f"{name}_packed": packed, f"{name}_scale": scale}


def pack_fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if ".experts." not in name and "_proj" not in name:
        return {name: weight}
    values, scale = fp8_block.encode(weight)
    return {name: values, f"{name}_scale_inv": scale}


def pack_int4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if ".experts." not in name:
        return {name: weight}
    packed, scale = int4_group.encode(weight)
    return {f"{name}_packed": packed, f"{name}_scale": scale.to(torch.bfloat16)}


def pack_blocks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """gpt-oss: the module keeps [E, in, out], the files [E, out, in / 32, 16]."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight}
    blocks, scales = mxfp4_codec.encode_blocks(weight.transpose(1, 2))
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


PACKERS: dict[str, Pack] = {"mxfp4": pack_mxfp4, "fp8": pack_fp8, "int4": pack_int4, "blocks": pack_blocks}


@pytest.fixture(scope="module")
def packed(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """``packed("mxfp4")``: a checkpoint of that packing beside the tiny example's data, built once."""
    import transformers

    made: dict[str, Any] = {}

    def build(kind: str) -> Any:
        if kind in made:
            return made[kind]
        width = WIDTH[kind]
        sizes = {**COMMON, "hidden_size": width, "intermediate_size": width, "head_dim": 16}
        torch.manual_seed(5)
        family = "GptOss" if kind == "blocks" else "Mixtral"
        config_class, model_class = (getattr(transformers, f"{family}{one}") for one in ("Config", "ForCausalLM"))
        model = model_class(config_class(**sizes)).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
        out = tmp_path_factory.mktemp(kind)
        checkpoint = out / "checkpoint"
        model.save_pretrained(checkpoint)
        plain = load_file(checkpoint / "model.safetensors")
        stored = {key: value for old, weight in plain.items() for key, value in PACKERS[kind](old, weight).items()}
        save_file({key: value.contiguous() for key, value in stored.items()}, checkpoint / "model.safetensors")
        config = json.loads((checkpoint / "config.json").read_text())
        method = {"fp8": "fp8", "blocks": "mxfp4"}.get(kind, "compressed-tensors")
        config["quantization_config"] = {"quant_method": method}
        (checkpoint / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny.checkpoint / file, checkpoint / file)
        for file in ("train.jsonl", "held_out.jsonl"):
            shutil.copy(tiny.data / file, out / file)
        made[kind] = type(tiny)(checkpoint, out)
        return made[kind]

    return build


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "blocks"])
def test_kept_packed_trains_what_decoding_at_load_trains(
    packed: Any, make_job: Any, strategy: Any, single_rank: Any, kind: str
) -> None:
    example = packed(kind)
    fmt = "fp8" if kind == "fp8" else "mxfp4"
    jobs = [make_job(example, strategy(base_format=one)) for one in ("compute", fmt)]
    for job in jobs:
        assert single_rank(job) == 0
        assert all(check.passed for check in job.record.checks)
    decoded_run, kept = jobs
    assert kept.losses == pytest.approx(decoded_run.losses, rel=1e-5) and kept.losses[-1] < kept.losses[0]
    norms = [[step.grad_norm for step in job.record.steps] for job in jobs]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    export_adapter(kept.run_dir, example.checkpoint)
    assert all(check.passed for check in check_adapter(kept.run_dir, example.checkpoint))
    if kind == "blocks":
        export_merged(kept.run_dir, example.checkpoint)
        check_merged(kept.run_dir, example.checkpoint)


def test_packed_experts_over_ranks_equal_one(
    packed: Any, make_job: Any, strategy: Any, single_rank: Any, run_many: Any
) -> None:
    """Each EP rank reads its own experts' bytes, placed or copied ones too; the rest is sharded by FSDP as ever."""
    example = packed("mxfp4")
    one = make_job(example, strategy(base_format="mxfp4"))
    two = make_job(example, strategy(ep=2, base_format="mxfp4", checkpointing="full"))
    places = {"expert_placement": "balanced", "redundant_experts": 1, "expert_slots": ("3,0,1,1,2,3",) * 2}
    placed = make_job(example, strategy(ep=2, base_format="mxfp4", **places))
    assert single_rank(one) == 0
    run_many(2, [two, placed])
    for job in (two, placed):
        assert job.losses == pytest.approx(one.losses, rel=1e-5)
        assert all(check.passed for check in job.record.checks)
    assert two.record.load.bytes_read < placed.record.load.bytes_read < one.record.load.bytes_read


def test_int4_is_decoded_at_load(packed: Any, make_job: Any, strategy: Any, single_rank: Any) -> None:
    job = make_job(packed("int4"), strategy())
    assert single_rank(job) == 0
    assert all(check.passed for check in job.record.checks)


def test_what_cannot_stay_packed_is_refused(packed: Any) -> None:
    _, files = open_files(packed("int4").checkpoint, torch.float32)
    stacks = {"e": ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj")}
    with pytest.raises(LegalityError, match="base-format"):
        packed_experts_of(files.names, stacks, "mxfp4", 1)
    _, files = open_files(packed("mxfp4").checkpoint, torch.float32)
    with pytest.raises(LegalityError, match="shard 1"):
        packed_experts_of(files.names, stacks, "mxfp4", 2)
    assert packed_experts_of(files.names, stacks, "mxfp4", 1) == {"e": "mxfp4"}
    assert packed_experts_of(files.names, stacks, "compute", 2) == {}


def test_gpt_oss_blocks_are_what_transformers_makes_of_them(packed: Any) -> None:
    """Out and in turned, square or not: 2I is 128 beside H of 64 here, and I is H in the second stack."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, files = open_files(packed("blocks").checkpoint, torch.float32)
    stored = load_file(files.folder / "model.safetensors")
    with ShardReader(files.folder, files.headers) as reader:
        for stack in ("gate_up_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.{stack}"
            found = read_base(reader, files.names, name, tuple(model.get_parameter(name).shape))
            assert torch.equal(found, convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"]))
            assert files.names.hub_names(name) == (name,) and not files.names.unused() and not files.names.missing()


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int4", "blocks"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_part_of_a_packed_weight_is_the_part_of_the_whole(packed: Any, kind: str, data: Any) -> None:
    model, files = open_files(packed(kind).checkpoint, torch.float32)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    shape = tuple(model.get_parameter(name).shape)
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        box.append((start, data.draw(st.integers(start + 1, size))))
    with ShardReader(files.folder, files.headers) as reader:
        whole = read_base(reader, files.names, name, shape)
        part = read_base(reader, files.names, name, shape, tuple(box))
    assert torch.equal(part, whole[tuple(slice(*one) for one in box)])


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int4"])
def test_decoded_values_are_the_original_up_to_the_format(packed: Any, kind: str) -> None:
    """The unpacked weights are drawn again and compared: a wrong scale or nibble order would be far off."""
    import transformers

    width = WIDTH[kind]
    torch.manual_seed(5)
    sizes = {**COMMON, "hidden_size": width, "intermediate_size": width, "head_dim": 16}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).float()
    _, files = open_files(packed(kind).checkpoint, torch.float32)
    name = "model.layers.1.mlp.experts.down_proj"
    original = model.get_parameter(name).detach() * 4.0
    with ShardReader(files.folder, files.headers) as reader:
        found = read_base(reader, files.names, name, tuple(original.shape)).float()
        piece = files.names.pieces(name)[0]
        assert decoded(reader, files.names.logical(piece.tensor), piece.source).dtype == torch.bfloat16
    error = float((found - original).norm() / original.norm())
    assert error < {"mxfp4": 0.15, "fp8": 0.04, "int4": 0.12}[kind], error
