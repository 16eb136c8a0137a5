"""Sparse attention on sequences cut over ranks trains what one process trains, fp32, to 1e-5.

The keys that an indexer chooses for a query lie on any rank: 5 of up to 24, so a wrong place is another gradient.
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

from shardwright.kernels.registry import source_sha256
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.strategy import Mesh, ParallelStrategy

ROOT = Path(__file__).resolve().parents[2]
TOP_K = 5
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": TOP_K,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
TWO = {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2}
THREE = {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_hidden_layers": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32", {**SIZES, **TWO}),
    "glm_moe_dsa": ("GlmMoeDsa", {**SIZES, **THREE, "indexer_types": ["full", "shared", "full"]}),
    "deepseek_v32-ties": ("DeepseekV32", {**SIZES, **TWO, "index_n_heads": 2}),
}
"""The last has two indexer heads: a quarter of its scores is 0."""
JOBS: dict[int, tuple[tuple[str, dict[str, Any]], ...]] = {
    2: (
        ("deepseek_v32", {"cp": 2}),
        ("deepseek_v32-ties", {"cp": 2}),
        ("glm_moe_dsa", {"cp": 2, "checkpointing": "full"}),
        ("kimi_k3-sparse", {"cp": 2}),
    ),
    4: (
        ("deepseek_v32", {"cp": 4, "checkpointing": "full"}),
        ("deepseek_v32-ties", {"cp": 4}),
        ("deepseek_v32", {"shard": 2, "cp": 2}),
        ("glm_moe_dsa", {"cp": 4}),
        ("glm_moe_dsa", {"shard": 2, "cp": 2, "checkpointing": "full"}),
        ("glm_moe_dsa", {"ep": 2, "cp": 2}),
        ("kimi_k3-sparse", {"cp": 4, "checkpointing": "full"}),
        ("kimi_k3-sparse", {"shard": 2, "cp": 2}),
        ("kimi_k3", {"cp": 4, "checkpointing": "full"}),
    ),
}


@pytest.fixture(scope="module")
def families(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint of each family as transformers writes it, two of Kimi K3 in its own layout."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    vocabulary = json.loads((tiny.checkpoint / "config.json").read_text())["vocab_size"]
    made = {}
    for name, (stem, fields) in FAMILIES.items():
        torch.manual_seed(7)
        config = getattr(transformers, f"{stem}Config")(**fields, vocab_size=vocabulary, eos_token_id=0)
        model = getattr(transformers, f"{stem}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2 or not bool(parameter.any()):
                    parameter.normal_(0.0, 0.3)
        out = tmp_path_factory.mktemp(name)
        model.save_pretrained(out / "checkpoint")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny.checkpoint / file, out / "checkpoint" / file)
        for file in ("train.jsonl", "held_out.jsonl"):
            shutil.copy(tiny.data / file, out / file)
        made[name] = type(tiny)(out / "checkpoint", out)
    for name, layers in (("kimi_k3", 5), ("kimi_k3-sparse", 2)):
        out = tmp_path_factory.mktemp(name)
        sparse_k3(out, layers)
        made[name] = type(tiny)(out / "checkpoint", out)
    return made


def sparse_k3(out: Path, layers: int) -> None:
    """examples/tiny-k3 with fewer chosen keys; of two layers both are sparse attentions."""
    place = ROOT / "examples/tiny-k3/build.py"
    spec = importlib.util.spec_from_file_location("shardwright_tests_sparse_k3", place)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(place.parents[1]), *sys.path])
        spec.loader.exec_module(module)
    module.INDEX_HEADS, module.INDEX_DIM, module.EXTRA = 16, 32, 16
    module.TEXT.update(index_n_heads=16, index_head_dim=32, qk_rope_head_dim=16, index_topk=TOP_K)
    if layers == 2:
        module.LAYERS, module.FULL_ATTENTION, module.SPARSE_ATTENTION = 2, (1, 2), (1, 2)
        lists = {"full_attn_layers": [1, 2], "sparse_attn_layers": [1, 2], "kda_layers": []}
        module.TEXT.update(num_hidden_layers=2, linear_attn_config={**module.TEXT["linear_attn_config"], **lists})
    module.make(out)


def planned(cp: int = 1, shard: int = 1, ep: int = 1, **axes: Any) -> ParallelStrategy:
    """Two sequences a micro-batch, eight a step."""
    mesh = Mesh(shard=shard, ep=ep, cp=cp)
    axes.setdefault("accumulation_steps", 8 // (mesh.data_ranks * 2))
    return ParallelStrategy(mesh=mesh, micro_batch_sequences=2, **axes)


def job_of(name: str, axes: dict[str, Any], families: dict[str, Any], make_job: Any, **recipe: Any) -> tuple[str, ...]:
    """The plan of a family, with our operators where the name says so."""
    family = name.partition("+")[0]
    lora = {"rank": 4, "alpha": "8", "targets": ["attention", "experts", *(INDEXERS if recipe else ())]}
    made = {"batch": {"global_batch_sequences": 8, "sequence_tokens": 24}, "lora": lora, **recipe}
    fusions = tuple(operators(family, layer) for layer in range(LAYERS[family])) if "+" in name else ()
    example = families[family]
    job = make_job(example, planned(**axes), recipe=made, fusions=fusions)
    return name, str(job.plan_path), str(example.checkpoint)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_chosen_keys_of_all_ranks_train_what_one_process_trains(
    ranks: int, families: dict[str, Any], make_job: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Losses, every adapter's gradient, the norm, loads and the held-out loss; documents across cuts; accumulation."""
    jobs = [job_of(name, axes, families, make_job) for name, axes in JOBS[ranks]]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    lines = [line for line in on_ranks(ranks, "context.py", str(path)).splitlines() if "worst" in line]
    assert len(lines) == len(jobs), lines


def test_a_run_on_cut_sequences_is_the_run_on_whole_ones(
    families: dict[str, Any], make_job: Any, run_many: Any, single_rank: Any
) -> None:
    """The worker, with packed documents: losses, norms, held-out losses and loads; every check of the run passed."""
    recipe = {"data": {"document_mask": True}, "schedule": {"steps": 2}}
    strategies = (planned(cp=cp, accumulation_steps=2) for cp in (1, 2))
    whole, cut = (make_job(families["glm_moe_dsa"], one, recipe=recipe) for one in strategies)
    assert single_rank(whole) == 0
    run_many(2, [cut])
    for ours, theirs in zip(cut.record.steps, whole.record.steps, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    held_out = [[one.loss for one in job.record.evaluations] for job in (cut, whole)]
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-5)
    assert [load.tokens for load in cut.record.expert_loads] == [load.tokens for load in whole.record.expert_loads]
    assert all(check.passed for check in cut.record.checks)
    assert {"context-equal", "first-loss", "gradient-norm"} <= {check.name for check in cut.record.checks}


LAYERS = {"deepseek_v32": 2, "glm_moe_dsa": 3, "kimi_k3-sparse": 2}
INDEXERS = ("*.indexer.wq_b", "*.indexer.wk", "*.indexer.weights_proj")
PARTS = {
    "q_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_b_weight": "kv_b_proj.weight",
    "o": "o_proj",
}
INDEXER_PARTS = {
    "index_q": "indexer.wq_b",
    "index_k": "indexer.wk",
    "index_norm": "indexer.k_norm",
    "index_weights": "indexer.weights_proj",
}
LAYOUTS = {
    "deepseek_v32": {"layout": "interleaved", "index_layout": "half-split"},
    "glm_moe_dsa": {"layout": "interleaved", "index_layout": "interleaved", "hands_on": True},
    "kimi_k3-sparse": {"layout": "none", "index_layout": "none", "call": "mask"},
}


def operators(family: str, layer: int) -> FusionDecision:
    """What the structure agent proposes for one attention."""
    k3, shared = family == "kimi_k3-sparse", family == "glm_moe_dsa" and layer == 1
    prefix, nope = ("language_model.model", 16) if k3 else ("model", SIZES["qk_nope_head_dim"])
    indexed = {} if shared else INDEXER_PARTS
    return FusionDecision(
        proposal_id=f"dsa.{layer}",
        pattern="dsa",
        variant="kernel",
        provider="shardwright",
        op="dsa",
        modules=(f"{prefix}.layers.{layer}.self_attn",),
        roles={**PARTS, **indexed, **({"gate": "g_proj"} if k3 else {})},
        constants={
            **LAYOUTS[family],
            "nope": nope,
            "rope": 16,
            "value": 16,
            "scale": str((nope + 16) ** -0.5),
            "top_k": TOP_K,
            "form": "shared" if shared else "own",
            "index_scale": str((16 * 32) ** -0.5),
            "index_first": True,
        },
        source_sha256=source_sha256("dsa"),
        tolerance="0.02",
    )


LEARNS = {"indexer": {"loss": "0.5"}}
WARMS = {"indexer": {"loss": "0.5", "stage": "dense"}}
FUSED: dict[int, tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]] = {
    2: (("kimi_k3-sparse+learns", {"cp": 2}, LEARNS),),
    4: (
        ("deepseek_v32+learns", {"shard": 2, "cp": 2}, LEARNS),
        ("deepseek_v32+warms", {"cp": 4}, WARMS),
        ("glm_moe_dsa+learns", {"cp": 4, "checkpointing": "full"}, LEARNS),
        ("kimi_k3-sparse+warms", {"shard": 2, "cp": 2}, WARMS),
    ),
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_operators_and_what_indexers_learn_are_those_of_whole_rows(
    ranks: int, families: dict[str, Any], make_job: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Our operators in Triton's interpreter, then the family's code, on the same cut rows: loss, gradients, KL."""
    pytest.importorskip("triton", reason="kernels need triton")
    jobs = [job_of(name, axes, families, make_job, **recipe) for name, axes, recipe in FUSED[ranks]]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    lines = [line for line in on_ranks(ranks, "context_dsa.py", str(path)).splitlines() if "worst" in line]
    assert len(lines) == len(jobs), lines
