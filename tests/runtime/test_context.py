"""Sequences cut over context-parallel ranks train what one process trains, fp32, to 1e-5.

Plain attention with grouped keys, latent attention, both kinds of delta rule, and Kimi K3's own layers.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.kernels.registry import source_sha256
from shardwright.runtime.batch import MicroBatch, whole_sequences
from shardwright.runtime.checks.export import check_adapter
from shardwright.runtime.context import Place, cut_batch
from shardwright.runtime.context_install import cut_sequences
from shardwright.runtime.export.peft import export_adapter
from shardwright.runtime.parallelize import reshard_ranks
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.strategy import Mesh, ParallelStrategy

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "tie_word_embeddings": False}
ROUTED = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
GQA = {"num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**SMALL, **ROUTED, **GQA, "num_experts": 8}),
    "mixtral": ("Mixtral", {**SMALL, **GQA, "intermediate_size": 48, "num_local_experts": 8, "sliding_window": 9}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **SMALL,
            **ROUTED,
            **MLA,
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **SMALL,
            **MLA,
            "q_lora_rank": None,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 16,
            "intermediate_size": 48,
            "num_shared_experts": 1,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "linear_attn_config": {
                "full_attn_layers": [3],
                "kda_layers": [1, 2],
                "head_dim": 32,
                "num_heads": 2,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **SMALL,
            **ROUTED,
            **GQA,
            "num_experts": 8,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}
PLACED = {"expert_placement": "balanced", "redundant_experts": 1, "expert_slots": ("3,0,1,2,6,7,6,5,4,3",) * 2}
JOBS: dict[int, tuple[tuple[str, dict[str, Any]], ...]] = {
    2: (
        ("qwen3_moe", {"cp": 2}),
        ("mixtral", {"cp": 2}),
        ("deepseek_v3", {"cp": 2, "checkpointing": "full"}),
        ("kimi_linear", {"cp": 2, "checkpointing": "full"}),
        ("qwen3_next", {"cp": 2}),
        ("kimi_k3", {"cp": 2}),
        ("mixtral-mxfp4", {"cp": 2, "base_format": "mxfp4"}),
    ),
    4: (
        ("qwen3_moe", {"cp": 4}),
        ("qwen3_moe", {"shard": 2, "cp": 2}),
        ("qwen3_moe", {"replicate": 2, "cp": 2, "checkpointing": "full"}),
        ("qwen3_moe", {"ep": 2, "cp": 2, **PLACED}),
        ("deepseek_v3", {"cp": 4}),
        ("deepseek_v3", {"ep": 2, "cp": 2, "checkpointing": "full"}),
        ("kimi_linear", {"cp": 4}),
        ("kimi_linear", {"ep": 2, "cp": 2, "overlap": "shared"}),
        ("kimi_linear", {"shard": 2, "cp": 2, "checkpointing": "full"}),
        ("kimi_k3", {"cp": 4, "checkpointing": "full"}),
        ("mixtral-mxfp4", {"ep": 2, "cp": 2, "base_format": "mxfp4"}),
    ),
}


@pytest.fixture(scope="module")
def families(tiny: Any, packed: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint of each family as transformers writes it, one of Kimi K3 in its own layout, a packed one."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    made = {}
    for name, (stem, fields) in FAMILIES.items():
        torch.manual_seed(7)
        model = getattr(transformers, f"{stem}ForCausalLM")(getattr(transformers, f"{stem}Config")(**fields))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2 or not bool(parameter.any()):
                    parameter.normal_(0.0, 0.15 if name == "qwen3_next" else 0.3)
        out = tmp_path_factory.mktemp(name)
        model.save_pretrained(out / "checkpoint")
        for file in ("train.jsonl", "held_out.jsonl"):
            shutil.copy(tiny.data / file, out / file)
        made[name] = type(tiny)(out / "checkpoint", out)
    out = tmp_path_factory.mktemp("kimi_k3")
    dense_k3(out)
    made["kimi_k3"] = type(tiny)(out / "checkpoint", out)
    return {**made, "mixtral-mxfp4": packed("mxfp4")}


def dense_k3(out: Path) -> None:
    """examples/tiny-k3 with its full attentions dense."""
    place = ROOT / "examples/tiny-k3/build.py"
    spec = importlib.util.spec_from_file_location("shardwright_tests_dense_k3", place)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(place.parents[1]), *sys.path])
        spec.loader.exec_module(module)
    module.SPARSE_ATTENTION = ()
    module.TEXT["linear_attn_config"]["sparse_attn_layers"] = []
    module.make(out)


def planned(cp: int = 1, shard: int = 1, ep: int = 1, replicate: int = 1, **axes: Any) -> ParallelStrategy:
    """Two sequences a micro-batch, eight a step unless told otherwise."""
    mesh = Mesh(replicate=replicate, shard=shard, ep=ep, cp=cp)
    axes.setdefault("accumulation_steps", 8 // (mesh.data_ranks * 2))
    return ParallelStrategy(mesh=mesh, micro_batch_sequences=2, **axes)


def job_of(name: str, axes: dict[str, Any], families: dict[str, Any], make_job: Any, **more: Any) -> tuple[str, ...]:
    example = families[name]
    recipe = {"batch": {"global_batch_sequences": 8, "sequence_tokens": 24}, "lora": {"rank": 4, "alpha": "8"}}
    return name, str(make_job(example, planned(**axes), recipe=recipe, **more).plan_path), str(example.checkpoint)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_cut_sequences_train_what_one_process_trains(
    ranks: int, families: dict[str, Any], make_job: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Losses, every adapter's gradient, the norm, loads and the held-out loss; documents across cuts; accumulation."""
    jobs = [job_of(name, axes, families, make_job) for name, axes in JOBS[ranks]]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    lines = [line for line in on_ranks(ranks, "context.py", str(path)).splitlines() if "worst" in line]
    assert len(lines) == len(jobs), lines


def test_operators_of_delta_rule_layers_run_on_cut_sequences(
    families: dict[str, Any], make_job: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Convolution and recurrence as the plan's operators, with the states that arrive: the same to 1e-5."""
    job = job_of("kimi_linear", {"cp": 2}, families, make_job, fusions=(delta_rule_layer(),))
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([job]))
    assert "operators" in on_ranks(2, "context_operators.py", str(path))


def delta_rule_layer() -> FusionDecision:
    """What the structure agent proposes for the two delta-rule layers of the tiny Kimi Linear, with heads of 32."""
    parts = {"decay": "forget_gate.f_b_proj", "decay_low": "forget_gate.f_a_proj", "beta": "b_proj", "gate": "g_b_proj"}
    sides = {"a_log": "forget_gate.A_log", "dt_bias": "forget_gate.dt_bias", "norm_weight": "o_norm.weight"}
    streams = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "conv_weight": "conv1d.weight"}
    sizes = {"heads": 2, "value_heads": 2, "key_width": 32, "value_width": 32}
    return FusionDecision(
        proposal_id="delta_rule_layer",
        pattern="delta_rule_layer",
        variant="kernel",
        provider="shardwright",
        op="kda",
        modules=("model.layers.0.self_attn", "model.layers.1.self_attn"),
        roles={**streams, **parts, **sides, "gate_low": "g_a_proj", "o": "o_proj"},
        constants={
            **sizes,
            "gate": "softplus",
            "act": "sigmoid",
            "eps": "0.00001",
            "form": "channels",
            "operators": "kda short_conv gated_rms_norm",
        },
        source_sha256=source_sha256("kda"),
        beside={other: source_sha256(other) for other in ("short_conv", "gated_rms_norm")},
        tolerance="0.02",
    )


@pytest.fixture(scope="module")
def runs(tiny: Any, make_job: Any, run_many: Any, single_rank: Any) -> dict[str, Any]:
    """Whole runs, with packed documents: on one rank, and cut over two."""
    recipe = {"data": {"document_mask": True}, "schedule": {"steps": 3}}
    made = {name: make_job(tiny, planned(cp=cp, accumulation_steps=2), recipe=recipe) for name, cp in CUTS.items()}
    assert single_rank(made["whole"]) == 0
    run_many(2, [made["cut"]])
    return made


CUTS = {"whole": 1, "cut": 2}


def test_a_run_on_cut_sequences_is_the_run_on_whole_ones(runs: dict[str, Any]) -> None:
    """Losses, norms, held-out losses and rows of each expert, step by step; every check of the run passed."""
    cut, whole = runs["cut"].record, runs["whole"].record
    for ours, theirs in zip(cut.steps, whole.steps, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    assert [one.loss for one in cut.evaluations] == pytest.approx([one.loss for one in whole.evaluations], abs=1e-5)
    assert [load.tokens for load in cut.expert_loads] == [load.tokens for load in whole.expert_loads]
    checks = {check.name: check for check in cut.checks}
    assert all(check.passed for check in cut.checks)
    assert {"context-equal", "first-loss", "gradient-norm", "documents-apart", "replicas-agree"} <= set(checks)
    assert "cut over 2 ranks" in checks["context-equal"].evidence
    assert "context-equal" not in {check.name for check in whole.checks}


def test_what_cut_ranks_saved_is_one_adapter(runs: dict[str, Any]) -> None:
    job = runs["cut"]
    export_adapter(job.run_dir, job.example.checkpoint)
    assert all(check.passed for check in check_adapter(job.run_dir, job.example.checkpoint))


def test_what_cannot_be_cut_is_refused_by_name(families: dict[str, Any]) -> None:
    """Layers with a state of another kind, pools of keys, attention that is not torch's, operators of whole rows."""
    import transformers

    place = Place(2, 0, object())  # type: ignore[arg-type]
    config = transformers.NemotronHConfig(**{**SMALL, **GQA, "layers_block_type": ["mamba"], "num_hidden_layers": 1})
    with torch.device("meta"):
        mamba = transformers.NemotronHForCausalLM(config)
        plain = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**FAMILIES["qwen3_moe"][1]))
    sparse = nn.ModuleDict({"attention": PoolIndexer()})
    refused = {"mamba": (mamba, ()), "sparse": (sparse, ()), "operator": (plain, (whole_row_operator(),))}
    found = {}
    for name, (model, fusions) in refused.items():
        with pytest.raises(LegalityError) as error:
            cut_sequences(model, place, fusions)
        found[name] = error.value
    assert found["mamba"].code == found["sparse"].code == "legality/context-layer"
    assert "Mamba2Mixer" in str(found["mamba"]) and "PoolIndexer" in str(found["sparse"])
    assert found["operator"].code == "legality/context-fusion" and "dsa" in str(found["operator"])
    inside = ParallelStrategy(mesh=Mesh(shard=2, ep=2, cp=2), reshard_scope="node")
    with pytest.raises(LegalityError, match="groups inside a node"):
        reshard_ranks(inside, 4)
    plain.config._attn_implementation = "eager"
    with pytest.raises(LegalityError, match="eager"):
        cut_sequences(plain, place, ())


class PoolIndexer(nn.Module):
    """Called as one that scores pools of keys."""

    def forward(self, hidden_states: Any, q_resid: Any, attention_mask: Any, cache: Any) -> None: ...


def whole_row_operator() -> FusionDecision:
    """Sparse attention whose indexer scores pools of keys."""
    return FusionDecision(
        proposal_id="x",
        pattern="dsa",
        variant="kernel",
        provider="shardwright",
        op="dsa",
        modules=("model.layers.0.self_attn",),
        roles={},
        constants={"pool": 4},
        source_sha256=source_sha256("dsa"),
        tolerance="0.02",
    )


def test_only_whole_pieces_of_text_are_cut() -> None:
    place = Place(2, 1, object())  # type: ignore[arg-type]
    ids = torch.arange(16).view(2, 8)
    mine, cut = cut_batch(whole_sequences(ids), place)
    assert mine.ids.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]] and mine.labels[0].tolist() == [3, 4, 5, 6]
    assert mine.positions is not None and mine.positions[1].tolist() == [2, 3, 4, 5] and cut.starts is None
    first, _ = cut_batch(whole_sequences(ids), Place(2, 0, object()))  # type: ignore[arg-type]
    assert first.ids[0].tolist() == [0, 1, 6, 7] and first.labels[0].tolist() == [1, 2, 7, -100]
    with pytest.raises(LegalityError, match="pieces"):
        cut_batch(whole_sequences(ids[:, :6]), place)
    with pytest.raises(LegalityError, match="images"):
        cut_batch(MicroBatch(ids, ids, None, ids), place)
