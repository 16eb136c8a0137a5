"""Tiny packed checkpoints: MXFP4 and fp8 beside each expert's name, 4-bit groups, gpt-oss's blocks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shardwright.checkpoints.packing import fp8_block, int4_group, mxfp4_codec

COMMON: dict[str, Any] = {
    "vocab_size": 264,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
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


def config_of(kind: str, experts: int) -> Any:
    """The configuration: gpt-oss for blocks, else Mixtral; hidden and expert width are alike."""
    import transformers

    family = transformers.GptOssConfig if kind == "blocks" else transformers.MixtralConfig
    width = WIDTH[kind]
    chosen = {"num_local_experts": experts, "num_experts_per_tok": min(2, experts - 1)}
    return family(**COMMON, **chosen, hidden_size=width, intermediate_size=width)


def weights_of(kind: str, experts: int = 4) -> Any:
    """The model before it is packed, always of the same weights."""
    import transformers

    torch.manual_seed(5)
    model_class = transformers.GptOssForCausalLM if kind == "blocks" else transformers.MixtralForCausalLM
    model = model_class(config_of(kind, experts)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def write(kind: str, experts: int, plain: Any, out: Path) -> Any:
    """The packed checkpoint in ``out``, beside the tokenizer and data of ``plain`` (an example)."""
    checkpoint = out / "checkpoint"
    weights_of(kind, experts).save_pretrained(checkpoint)
    plain_weights = load_file(checkpoint / "model.safetensors")
    stored = {
        key: value for name, weight in plain_weights.items() for key, value in PACKERS[kind](name, weight).items()
    }
    save_file({key: value.contiguous() for key, value in stored.items()}, checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": {"fp8": "fp8", "blocks": "mxfp4"}.get(kind, "compressed-tensors")}
    (checkpoint / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(plain.checkpoint / file, checkpoint / file)
    for file in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(plain.data / file, out / file)
    return type(plain)(checkpoint, out)
