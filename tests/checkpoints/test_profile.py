"""Exact counts from headers alone, against values published by vendors and against models built in memory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.schemas.canonical import canonical_bytes
from shardwright.schemas.errors import CheckpointError
from shardwright.schemas.profile import CheckpointProfile

TOTALS: dict[str, tuple[int, int, int, int]] = {
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248, 12_748_853_248, 0),
    "qwen3-30b": (30_532_122_624, 3_353_032_704, 3_041_867_776, 0),
    "qwen3-235b": (235_093_634_560, 22_190_763_520, 21_568_433_664, 0),
    "qwen3-next": (79_674_391_296, 3_874_929_408, 3_563_764_480, 0),
    "deepseek-v3": (671_026_404_352, 37_552_282_624, 36_625_603_584, 14_848),
    "deepseek-v3.2": (671_877_929_216, 38_403_807_488, 37_477_128_448, 14_848),
    "kimi-k2": (1_026_408_209_408, 32_861_477_888, 31_687_072_768, 23_040),
    "glm-5": (743_911_199_232, 41_784_709_632, 40_833_126_912, 19_200),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912, 5_132_849_472, 0),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704, 3_608_307_264, 0),
    "minimax-m2": (228_689_748_992, 11_030_537_216, 10_415_940_608, 15_872),
    "kimi-linear": (49_122_675_072, 3_484_453_248, 3_106_965_888, 6_656),
}
"""Model → total, active, active without the input embedding, buffer values. Vendors' published numbers are these,
rounded (46.7B / 12.9B for Mixtral, 671B / 37B for DeepSeek-V3, 116.83B / 5.13B for gpt-oss-120b)."""

COMPONENTS: dict[str, dict[str, int]] = {
    "mixtral-8x7b": {
        "routed_experts": 45_097_156_608,
        "attention": 1_342_177_280,
        "router": 1_048_576,
        "embedding": 131_072_000,
        "head": 131_072_000,
        "norms": 266_240,
    },
    "qwen3-30b": {"routed_experts": 28_991_029_248, "attention": 905_981_952, "router": 12_582_912},
    "qwen3-235b": {"routed_experts": 227_096_395_776, "attention": 6_702_521_856, "router": 49_283_072},
    "qwen3-next": {"routed_experts": 77_309_411_328, "shared_experts": 151_093_248, "router": 50_331_648},
    "deepseek-v3": {
        "routed_experts": 653_908_770_816,
        "shared_experts": 2_554_331_136,
        "attention": 11_413_547_008,
        "router": 106_430_464,
        "dense_mlp": 1_189_085_184,
        "embedding": 926_679_040,
    },
    "deepseek-v3.2": {"indexer": 851_524_864, "attention": 11_413_547_008},
    "kimi-k2": {
        "routed_experts": 1_014_686_023_680,
        "shared_experts": 2_642_411_520,
        "attention": 6_168_569_856,
        "router": 165_150_720,
        "dense_mlp": 396_361_728,
    },
    "glm-5": {
        "routed_experts": 724_775_731_200,
        "shared_experts": 2_831_155_200,
        "attention": 12_871_732_224,
        "indexer": 731_008_512,
        "router": 117_964_800,
        "dense_mlp": 679_477_248,
    },
    "gpt-oss-120b": {"routed_experts": 114_701_598_720, "attention": 955_805_184, "router": 13_275_648},
    "gpt-oss-20b": {"routed_experts": 19_116_933_120, "attention": 637_203_456, "router": 2_212_608},
    "minimax-m2": {"routed_experts": 224_680_476_672, "attention": 2_730_936_320, "router": 48_758_784},
    "kimi-linear": {
        "routed_experts": 47_110_422_528,
        "shared_experts": 184_025_088,
        "router": 15_335_424,
        "dense_mlp": 63_700_992,
        "head": 377_487_360,
    },
}


KINDS: dict[str, list[tuple[str, int]]] = {
    "mixtral-8x7b": [("attention+moe", 32)],
    "qwen3-next": [("linear-attention+moe", 36), ("attention+moe", 12)],
    "deepseek-v3": [("mla+dense", 3), ("mla+moe", 58)],
    "deepseek-v3.2": [("dsa+dense", 3), ("dsa+moe", 58)],
    "glm-5": [("dsa+dense", 3), ("dsa+moe", 75)],
    "gpt-oss-20b": [("sliding-attention+moe", 12), ("attention+moe", 12)],
    "kimi-linear": [("linear-attention+dense", 1), ("linear-attention+moe", 19), ("mla+moe", 7)],
}


def make(published: Any, name: str) -> Any:
    return {
        "mixtral-8x7b": published.mixtral_8x7b,
        "qwen3-30b": lambda: published.qwen3_moe(48, 2048, 32, 4, 768),
        "qwen3-235b": lambda: published.qwen3_moe(94, 4096, 64, 4, 1536),
        "qwen3-next": published.qwen3_next_80b,
        "deepseek-v3": lambda: published.latent(published.DEEPSEEK_V3),
        "deepseek-v3.2": lambda: published.latent(published.DEEPSEEK_V32),
        "kimi-k2": lambda: published.latent(published.KIMI_K2),
        "glm-5": lambda: published.latent(published.GLM_5),
        "gpt-oss-120b": lambda: published.gpt_oss(36, 128),
        "gpt-oss-20b": lambda: published.gpt_oss(24, 32),
        "minimax-m2": published.minimax_m2,
        "kimi-linear": published.kimi_linear_48b,
    }[name]()


@pytest.mark.parametrize("name", TOTALS)
def test_published_models_are_counted_exactly(published: Any, tmp_path: Path, name: str) -> None:
    checkpoint = make(published, name)
    profile = profile_checkpoint(published.write(tmp_path, checkpoint, files=3))
    counts = profile.parameters
    found = (counts.total, counts.active.all, counts.active.without_input_embedding, counts.buffers)
    assert found == TOTALS[name]
    assert {key: counts.by_component[key] for key in COMPONENTS[name]} == COMPONENTS[name]  # type: ignore[index]
    assert sum(counts.by_component.values()) == counts.total + counts.mtp
    assert profile.tensors == len(checkpoint.tensors)
    assert sum(part.stored_bytes for part in profile.packing) == profile.stored_bytes
    assert sorted(i for kind in profile.layer_kinds for i in kind.layer_indices) == list(
        range(profile.shape.num_layers)
    )
    assert (
        sum(kind.expert_parameters * len(kind.layer_indices) for kind in profile.layer_kinds)
        == (counts.by_component["routed_experts"])
    )


def test_a1_prediction_layers_are_a_line_of_their_own(published: Any, tmp_path: Path) -> None:
    """671B is the main model; the files' 685B hold 14B of a prediction layer (with its copies of both embeddings)."""
    with_mtp = profile_checkpoint(published.write(tmp_path, published.latent(published.DEEPSEEK_V3))).parameters
    layer = (653_908_770_816 + 2_554_331_136 + 106_430_464) // 58 + 11_413_547_008 // 61 + 2 * 7168
    projection, norms, copies = 7168 * 14336, 3 * 7168, 2 * 926_679_040
    assert with_mtp.total == 671_026_404_352
    assert with_mtp.mtp == layer + projection + norms + copies == 13_463_426_048
    assert with_mtp.active.all == 37_552_282_624


def test_a2_active_count_with_dense_and_moe_layers_mixed(save_tiny: Any) -> None:
    folder, model = save_tiny("t-dsv3")
    profile = profile_checkpoint(folder)
    assert profile.parameters.total == 290_016 == sum(p.numel() for p in model.parameters())
    assert (profile.parameters.buffers, profile.parameters.by_component["routed_experts"]) == (24, 147_456)
    assert profile.parameters.active.all == 179_424 == 290_016 - 147_456 + 147_456 * 2 // 8
    assert [(kind.name, kind.layer_indices) for kind in profile.layer_kinds] == [
        ("mla+dense", (0,)),
        ("mla+moe", (1, 2, 3)),
    ]


@pytest.mark.parametrize(("tied", "total"), [(True, 171_200), (False, 187_584)])
def test_a3_a_tied_head_counts_once(save_tiny: Any, tied: bool, total: int) -> None:
    folder, model = save_tiny("t-qw", tie_word_embeddings=tied)
    profile = profile_checkpoint(folder)
    assert profile.parameters.total == total == sum(p.numel() for p in model.parameters())
    assert profile.parameters.by_component["routed_experts"] == 49_152
    assert profile.tied_weights == ((("lm_head.weight", "model.embed_tokens.weight"),) if tied else ())
    assert [(kind.mlp, kind.layer_indices) for kind in profile.layer_kinds] == [("dense", (0, 2, 3)), ("moe", (1,))]


def test_a_tied_head_that_is_stored_all_the_same_counts_once(save_tiny: Any) -> None:
    folder, _ = save_tiny("t-qw", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    counts = profile_checkpoint(folder).parameters
    assert counts.total == 171_200
    assert counts.active.without_input_embedding == counts.active.all
    assert counts.active.without_embeddings == counts.active.all - 256 * 64


def saved(folder: Path, config: Any) -> Any:
    """A tiny model of a configuration, saved; the model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model


def test_experts_in_one_matrix_with_sizes_in_groups_of_their_own(tmp_path: Path) -> None:
    """DBRX: ``ffn_config`` and ``attn_config``; three matrices ``[E·I, H]``."""
    from transformers import DbrxConfig

    ffn = {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
    config = DbrxConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=128, ffn_config=ffn,
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4},
    )  # fmt: skip
    model = saved(tmp_path, config)
    profile = profile_checkpoint(tmp_path)
    total, routed = sum(p.numel() for p in model.parameters()), 2 * 3 * 4 * 40 * 32
    assert (profile.parameters.total, profile.parameters.by_component["routed_experts"]) == (total, routed)
    assert profile.parameters.active.all == total - routed // 2
    shape = profile.shape
    assert (shape.num_experts, shape.experts_per_token, shape.expert_intermediate_size) == (4, 2, 40)
    assert (shape.num_key_value_heads, shape.max_position_tokens, shape.expert_stacks) == (2, 128, False)
    assert [(kind.mlp, kind.expert_parameters) for kind in profile.layer_kinds] == [("moe", routed // 2)]


@pytest.mark.parametrize("routed", [True, False])
def test_experts_of_one_neuron_are_routed_where_there_are_any(tmp_path: Path, routed: bool) -> None:
    """Doge: two tables ``[E, H]`` beside a dense MLP; its configuration names experts even where it has none."""
    from transformers import DogeConfig

    config = DogeConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, num_experts=16,
        num_experts_per_tok=4, is_moe=routed,
    )  # fmt: skip
    model = saved(tmp_path, config)
    profile = profile_checkpoint(tmp_path)
    total, tables = sum(p.numel() for p in model.parameters()), 2 * 2 * 16 * 32 if routed else 0
    by = profile.parameters.by_component
    assert (profile.parameters.total, by.get("routed_experts", 0)) == (total, tables)
    assert by.get("router", 0) == (2 * 8 * 32 if routed else 0) and by["dense_mlp"] == 2 * 3 * 48 * 32
    assert profile.parameters.active.all == total - tables * 12 // 16
    shape = profile.shape
    assert (shape.num_experts, shape.expert_stacks) == ((16, False) if routed else (0, True))
    assert (shape.dense_intermediate_size, shape.expert_intermediate_size) == (48, 1 if routed else 0)
    assert [kind.mlp for kind in profile.layer_kinds] == ["moe" if routed else "dense"]


def test_a_speech_generator_is_no_part_of_the_language_model() -> None:
    from shardwright.checkpoints.components import component_of

    assert component_of("talker.model.layers.0.mlp.experts.gate_up_proj", 3) == "vision"
    assert component_of("code2wav.pre_transformer.layers.0.self_attn.q_proj.weight", 2) == "vision"
    assert component_of("thinker.model.layers.0.mlp.experts.gate_up_proj", 3) == "routed_experts"


def test_a4_scales_and_packed_bytes_are_not_parameters(published: Any, tmp_path: Path) -> None:
    profile = profile_checkpoint(published.write(tmp_path, published.gpt_oss(24, 32)))
    (packed,) = [part for part in profile.packing if part.format == "gpt-oss-mxfp4"]
    assert packed.logical_parameters == 24 * 796_262_400
    assert packed.stored_bytes == 24 * 423_014_400
    assert packed.block == (1, 1, 32)


@pytest.mark.parametrize("name", ["mixtral", "t-lora", "granitemoe", "gpt_oss", "kimi_linear"])
def test_counts_equal_the_model_in_memory(save_tiny: Any, name: str) -> None:
    folder, model = save_tiny(name)
    counts = profile_checkpoint(folder).parameters
    assert counts.total == sum(p.numel() for p in model.parameters())
    held = {n for n, _ in model.named_buffers()} & set(model.state_dict())
    assert counts.buffers == sum(b.numel() for n, b in model.named_buffers() if n in held)


def test_profile_of_the_same_files_is_the_same_bytes(mixtral: tuple[Path, Any]) -> None:
    first, second = (profile_checkpoint(mixtral[0]) for _ in range(2))
    assert canonical_bytes(first) == canonical_bytes(second)
    assert CheckpointProfile.model_validate_json(canonical_bytes(first)) == first


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "num_hidden_layers": {"num_hidden_layers": 3},
    "vocab_size": {"vocab_size": 97},
    "hidden_size": {"hidden_size": 64},
    "the number of experts": {"num_local_experts": 8},
    "experts of which": {"num_experts_per_tok": 9},
    "non-negative integer": {"num_local_experts": "many"},
}


@pytest.mark.parametrize("field", CONTRADICTIONS)
def test_a_config_that_contradicts_the_tensors_is_refused(
    mixtral: tuple[Path, Any], tmp_path: Path, field: str
) -> None:
    for path in mixtral[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **CONTRADICTIONS[field]}))
    with pytest.raises(CheckpointError, match=field) as caught:
        profile_checkpoint(tmp_path)
    assert caught.value.code == "checkpoint/config-contradiction"


def test_unknown_architecture_is_profiled_from_headers(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    for path in mixtral[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "never_heard_of", "architectures": ["NeverHeardOf"], "auto_map": {"AutoModel": "evil.X"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    profile = profile_checkpoint(tmp_path)
    assert not profile.transformers_class
    assert profile.parameters == profile_checkpoint(mixtral[0]).parameters
    assert any("not run" in warning for warning in profile.warnings)
    assert not profile.shape.expert_stacks, "its own code has a module for each expert, as its files have"


@pytest.mark.slow
def test_kimi_k3_from_its_headers(published: Any, tmp_path: Path) -> None:
    """497,220 tensors in 96 files; its audit adds 84,640 values of router biases and A_log padding to the total."""
    folder = published.write(tmp_path, published.kimi_k3(), files=96)
    started = time.perf_counter()
    profile = profile_checkpoint(folder)
    seconds = time.perf_counter() - started
    counts = profile.parameters
    assert (profile.tensors, profile.files, profile.stored_bytes) == (497_220, 96, 1_560_860_324_864)
    assert (counts.total, counts.buffers) == (2_779_931_752_544, 84_640)
    assert counts.total + counts.buffers == 2_779_931_837_184
    assert counts.by_component["routed_experts"] == 2_722_740_830_208
    assert counts.by_component["latent_projections"] == 4_727_310_336
    assert counts.by_component["linear_attention"] == 30_618_088_704 - 2_208
    assert counts.by_component["attention"] == 5_572_706_304
    assert counts.by_component["vision"] == 401_214_464
    assert counts.by_component["projector"] == 46_144_512
    assert round(counts.active.without_input_embedding / 1e7) == 10_419
    assert profile.transformers_class, "a model of ours stands in for the checkpoint's own code"
    assert [(kind.name, len(kind.layer_indices)) for kind in profile.layer_kinds] == [
        ("linear-attention+dense", 1),
        ("linear-attention+moe", 68),
        ("mla+moe", 24),
    ]
    assert seconds < 60, "a loaded machine may take several times the 6 s it takes alone"
