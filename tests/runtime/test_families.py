"""Eight families on six meshes: loss, gradient norm and every adapter's gradient are the single process's, fp32.

They cover every way that experts are stored: merged or single stacks, [E, out, in] and [E, in, out], gate first or
interleaved, without a gate, with biases, weighted before or after; softmax and sigmoid routers, groups, shared experts,
latent projections, and layers of attention, DSA, KDA and Mamba.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.checkpoints.peft_layout import from_peft, peft_keys, peft_selection, to_peft
from shardwright.runtime.checks.documents import documents_apart
from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.export.merged import export_merged
from shardwright.runtime.export.peft import export_adapter
from shardwright.runtime.lora.inject import adapter_names, adapter_shapes
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.reference import add_plain_lora, load_plain
from shardwright.runtime.segments import keep_apart
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.recipe import DataSpec

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "tie_word_embeddings": False}
ROUTED = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
GROUPS = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
GQA = {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**GQA, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 8}),
    "qwen3_moe": ("Qwen3Moe", {**GQA, **ROUTED, "num_hidden_layers": 2, "num_experts": 8}),
    "deepseek_v3": (
        "DeepseekV3",
        {**MLA, **ROUTED, **GROUPS, "intermediate_size": 48, "num_hidden_layers": 2},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **MLA,
            **ROUTED,
            **GROUPS,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "index_topk": 4,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **MLA,
            "q_lora_rank": None,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 3,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "full_attn_layers": [3],
                "kda_layers": [1, 2],
                "head_dim": 8,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **GQA,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **GQA,
            **ROUTED,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 16,
            "moe_latent_size": 16,
            "layers_block_type": ["mamba", "moe", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "conv_kernel": 4,
        },
    ),
    "llama4": (
        "Llama4",
        {
            **GQA,
            "intermediate_size": 16,
            "intermediate_size_mlp": 48,
            "num_hidden_layers": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "pad_token_id": 0,
        },
    ),
}
TWO = ({"shard": 2}, {"ep": 2}, {"replicate": 2})
FOUR = ({"shard": 2, "ep": 2}, {"ep": 4}, {"replicate": 2, "ep": 2})


@pytest.fixture(scope="module")
def families(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint of each family as transformers writes it, beside the tiny data."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    made = {}
    for name, (stem, fields) in FAMILIES.items():
        suffix = "Text" if name == "llama4" else ""
        if not hasattr(transformers, f"{stem}{suffix}Config"):
            continue
        config = getattr(transformers, f"{stem}{suffix}Config")(**{**SMALL, **fields})
        torch.manual_seed(7)
        model = getattr(transformers, f"{stem}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2 or not bool(parameter.any()):
                    parameter.normal_(0.0, 0.3)
        out = tmp_path_factory.mktemp(name)
        model.save_pretrained(out / "checkpoint")
        for file in ("train.jsonl", "held_out.jsonl"):
            shutil.copy(tiny.data / file, out / file)
        made[name] = type(tiny)(out / "checkpoint", out)
    assert len(made) >= 6
    return made


def run(
    ranks: int,
    meshes: tuple[dict[str, int], ...],
    families: Any,
    make_job: Any,
    strategy: Any,
    on_ranks: Any,
    to: Path,
    **lora: Any,
) -> None:
    jobs = []
    recipe = {"batch": {"global_batch_sequences": 8}, "lora": {"rank": 2, "alpha": "4", **lora}}
    for axes in meshes:
        for index, (name, example) in enumerate(families.items()):
            checkpointing = "full" if index % 2 else "none"
            planned = strategy(**axes, accumulation_steps=8 // ranks, checkpointing=checkpointing)
            job = make_job(example, planned, recipe=recipe)
            jobs.append((name, str(job.plan_path), str(example.checkpoint)))
    path = to / f"families{ranks}.json"
    path.write_text(json.dumps(jobs))
    out = on_ranks(ranks, "families.py", str(path))
    lines = [line for line in out.splitlines() if "worst" in line]
    assert len(lines) == len(meshes) * len(families), out
    assert all("uneven 1" in line for line in lines), out
    empty = {line.split()[1]: int(line.rsplit("empty ", 1)[1]) for line in lines}
    idle = {"mixtral", "qwen3_moe", "gpt_oss", "llama4"} & set(families)
    assert all(empty[f"{name}:"] > 0 for name in idle), out


def test_one_rank_equals_plain(families: Any, make_job: Any, strategy: Any, on_ranks: Any, tmp_path: Path) -> None:
    run(1, ({},), families, make_job, strategy, on_ranks, tmp_path)


@pytest.mark.slow
def test_two_ranks_equal_plain(families: Any, make_job: Any, strategy: Any, on_ranks: Any, tmp_path: Path) -> None:
    run(2, TWO, families, make_job, strategy, on_ranks, tmp_path)


@pytest.mark.slow
def test_four_ranks_equal_plain(families: Any, make_job: Any, strategy: Any, on_ranks: Any, tmp_path: Path) -> None:
    run(4, FOUR, families, make_job, strategy, on_ranks, tmp_path)


ROUTED_BY = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "llama4")
"""Softmax and sigmoid, groups, offsets, products in fp32, a router that is a linear itself."""


@pytest.mark.slow
def test_adapted_routers_equal_plain(
    families: Any, make_job: Any, strategy: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """D10, D11, D12: a router's gradient comes from rows that other ranks compute, and is the single process's."""
    some = {name: families[name] for name in ROUTED_BY if name in families}
    asked = {"targets": ["attention", "experts", "router"], "allow_router": True}
    run(2, ({"ep": 2}, {"shard": 2}), some, make_job, strategy, on_ranks, tmp_path, **asked)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_that_can_be_adapted_is_exported(
    name: str, families: Any, make_job: Any, strategy: Any, single_rank: Any
) -> None:
    """Every role of a family in one run: its checks hold, a fresh PEFT loads it, and so does what loads the base."""
    if name not in families:
        pytest.skip(f"this transformers has no {name}")
    example = families[name]
    for file in ("train.npy", "held_out.npy"):
        np.save(example.data / file, np.random.default_rng(1).integers(3, 90, 2000).astype(np.uint16))
    recipe = {
        "lora": {"targets": ["all-linear", "router", "head"], "allow_router": True},
        "data": {"train": "train.npy", "held_out": "held_out.npy", "format": "packed"},
        "batch": {"sequence_tokens": 16},
        "schedule": {"steps": 2, "held_out_sequences": 2},
    }
    job = make_job(example, strategy(checkpointing="full"), recipe=recipe)
    assert {"attention", "experts", "router", "head"} <= {target.role for target in job.plan.decision.lora_targets}
    assert single_rank(job) == 0
    assert [check for check in job.record.checks if not check.passed] == []
    export_adapter(job.run_dir, example.checkpoint)
    assert [check for check in check_adapter(job.run_dir, example.checkpoint) if not check.passed] == []
    facts, _ = export_merged(job.run_dir, example.checkpoint)
    assert facts.retained_delta == pytest.approx(1, abs=1e-6)


SHARING = ("mixtral", "gpt_oss", "nemotron_h", "llama4")
"""Every order of storage, with a gate and without, weighted before and after."""


@pytest.mark.parametrize(("ranks", "meshes"), [(1, ({},)), (2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_one_pair_for_all_experts_equals_plain(
    ranks: int,
    meshes: tuple[dict[str, int], ...],
    families: Any,
    make_job: Any,
    strategy: Any,
    on_ranks: Any,
    tmp_path: Path,
) -> None:
    """The shared pair's gradient is the sum over all experts and ranks, idle experts or not."""
    chosen = {name: families[name] for name in SHARING if name in families}
    run(ranks, meshes, chosen, make_job, strategy, on_ranks, tmp_path, experts="shared")


PEFT_TARGETS = {"nemotron_h": ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]}
"""PEFT refuses ``out_proj`` in Mamba models."""


def _as_peft_reads(
    name: str, target: LoraTarget, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """PEFT takes a stack for [E, out, in] unless its class says ``is_transposed``, which Llama 4's does not: there its
    A is our Bᵀ and its B our Aᵀ."""
    if name == "llama4" and target.kind == "experts":
        return b.mT.contiguous(), a.mT.contiguous()
    return a, b


@pytest.mark.parametrize("name", list(FAMILIES))
def test_plain_lora_equals_peft(name: str, families: Any, make_job: Any, strategy: Any) -> None:
    """The reference's loss and every adapter's gradient are PEFT's own, in its layout."""
    from peft import LoraConfig, get_peft_model

    if name not in families:
        pytest.skip(f"transformers ships no {name}")
    example = families[name]
    lora = {"rank": 2, "alpha": "4", "targets": PEFT_TARGETS.get(name, ["attention", "experts"])}
    job = make_job(example, strategy(), recipe={"lora": lora})
    targets = job.plan.decision.lora_targets
    shapes: dict[str, tuple[int, ...]] = {}
    for target in targets:
        shapes.update(zip(adapter_names(target), adapter_shapes(target), strict=True))
    generator = torch.Generator().manual_seed(2)
    whole = {key: torch.randn(shape, generator=generator) * 0.2 for key, shape in shapes.items()}
    ids = torch.randint(3, 90, (2, 9), generator=generator)
    plain, files = load_plain(example.checkpoint, torch.float32, torch.device("cpu"))
    order = [key for key, _ in plain.named_parameters()]
    leaves = add_plain_lora(plain, targets, whole, files.config.text_model_type)
    ours = summed_loss(plain, ids)
    ours.backward()
    base, _ = load_plain(example.checkpoint, torch.float32, torch.device("cpu"))
    model: Any = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, **peft_selection(targets)))
    values = dict(model.named_parameters())
    keys = peft_keys(targets, order)
    for target in targets:
        pair = to_peft(*_as_peft_reads(name, target, *(whole[adapter] for adapter in adapter_names(target))))
        for key, value in zip(keys[target.parameter], pair, strict=True):
            values[key.replace(".weight", ".default.weight")].data.copy_(value)
    theirs = summed_loss(model, ids)
    theirs.backward()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-4)
    for target in targets:
        gradients = [values[key.replace(".weight", ".default.weight")].grad for key in keys[target.parameter]]
        a, b = _as_peft_reads(name, target, *from_peft(gradients[0], gradients[1], target.num_experts))
        for adapter, expected in zip(adapter_names(target), (a, b), strict=True):
            found = leaves[adapter].grad
            assert found is not None, adapter
            scale = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-5, msg=f"{name} {adapter}")


@pytest.mark.parametrize(
    ("name", "kept", "apart"), [("mixtral", False, True), ("kimi_linear", False, False), ("kimi_linear", True, True)]
)
def test_documents_in_one_row_are_tried_on_the_family(name: str, kept: bool, apart: bool, families: Any) -> None:
    """Attention obeys positions that start anew; KDA's state crosses them unless the runtime keeps it apart."""
    if name not in families:
        pytest.skip(f"transformers ships no {name}")
    model, files = load_plain(families[name].checkpoint, torch.float32, torch.device("cpu"))
    if kept:
        keep_apart(model)
    rows = (np.arange(3 * 16).reshape(1, 3, 16) * 5) % 90
    trainer: Any = SimpleNamespace(
        batches=SimpleNamespace(sequences=rows),
        live=SimpleNamespace(model=model, files=files),
        device=SimpleNamespace(torch_device=torch.device("cpu")),
        recipe=SimpleNamespace(
            precision=SimpleNamespace(base="float32"), data=DataSpec(train="a", held_out="b", document_mask=True)
        ),
    )
    (found,) = documents_apart(trainer)
    assert found.passed is apart, found.evidence
    trainer.recipe.data = DataSpec(train="a", held_out="b", packing=False)
    assert documents_apart(trainer) == ()
