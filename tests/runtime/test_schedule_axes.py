"""Values of the plan's schedule: each gives plain transformers' loss, norm and every adapter's gradient.

Two stages of dispatch in one piece and in chunks, shared experts under the dispatch, alone and of chunks, padded rows,
some recomputed layers, gathers ahead, weights kept inside a node. All four-rank plans share one torchrun, on two nodes
of two ranks.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch

from shardwright.runtime.checkpointing import checkpoint_layers, recomputed
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.lora.inject import adapter_names, adapter_shapes
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.parallelize import decoder_layers, reshard_ranks
from shardwright.runtime.reference import add_plain_lora, load_plain
from shardwright.schemas.cluster import ClusterRef
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.strategy import Mesh, ParallelStrategy

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "tie_word_embeddings": False}
ROUTED = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3",
        {
            **ROUTED,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **ROUTED,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
            "intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 16,
            "moe_latent_size": 16,
            "layers_block_type": ["attention", "moe"],
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
            "num_key_value_heads": 2,
            "head_dim": 8,
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
SHARED = {"overlap": "shared"}
TWO_STAGES = {"ep": 4, "dispatch": "hierarchical"}
CHUNKS = {"overlap": "chunked", "overlap_chunks": 3}
BOTH = {"overlap": "shared", "overlap_chunks": 3}
PLACED = {"expert_placement": "balanced"}
ORDER, BACK = "5,0,7,2,1,6,3,4", "7,6,5,4,3,2,1,0"
COPIES = "0,3,5,1,3,7,2,3,6,0,3,4"
"""Four ranks of three places: expert 3 on all of them, expert 0 on two."""
COPIES2 = "5,0,7,2,3,6,3,4,1,7,2,0"
"""Two ranks of six places: experts 0, 2, 3 and 7 on both."""
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "two-stages": ("deepseek_v3", TWO_STAGES),
    "two-stages-weighed-before": ("llama4", {**TWO_STAGES, "checkpointing": "full"}),
    "two-stages-chunks": ("deepseek_v3", {**TWO_STAGES, **CHUNKS, "checkpointing": "full"}),
    "two-stages-shared": ("nemotron_h", {**TWO_STAGES, **SHARED}),
    "shared": ("deepseek_v3", {"ep": 4, **SHARED}),
    "shared-recomputed": ("deepseek_v3", {"ep": 2, "shard": 2, **SHARED, "checkpointing": "full"}),
    "shared-latent": ("nemotron_h", {"ep": 2, "replicate": 2, **SHARED, "checkpointing": "full"}),
    "shared-weighed-before": ("llama4", {"ep": 4, **SHARED}),
    "both": ("deepseek_v3", {"ep": 2, "shard": 2, **BOTH, "checkpointing": "full"}),
    "both-latent": ("nemotron_h", {"ep": 4, **BOTH}),
    "both-weighed-before": ("llama4", {"ep": 2, "replicate": 2, **BOTH}),
    "both-two-stages": ("deepseek_v3", {**TWO_STAGES, **BOTH, "expert_padding_tokens": 8}),
    "padded": ("deepseek_v3", {"ep": 2, "shard": 2, "expert_padding_tokens": 16, "checkpointing": "full"}),
    "padded-weighed-before": ("llama4", {"ep": 2, "replicate": 2, "expert_padding_tokens": 8}),
    "padded-alone": ("nemotron_h", {"ep": 4, "expert_padding_tokens": 3}),
    "padded-two-stages": ("nemotron_h", {**TWO_STAGES, **CHUNKS, "expert_padding_tokens": 16}),
    "padded-copies": (
        "deepseek_v3",
        {"ep": 4, **PLACED, "redundant_experts": 1, "expert_slots": (COPIES, COPIES), "expert_padding_tokens": 8},
    ),
    "layers": ("deepseek_v3", {"ep": 2, "shard": 2, "checkpointing": "layers", "checkpointed_layers": (0, 2)}),
    "prefetch2": ("deepseek_v3", {"ep": 2, "shard": 2, "prefetch_depth": 2}),
    "prefetch4": ("llama4", {"shard": 4, "prefetch_depth": 4, "checkpointing": "full"}),
    "placed": ("deepseek_v3", {"ep": 4, **PLACED, "expert_slots": (ORDER, ORDER)}),
    "placed-sharded": (
        "llama4",
        {"ep": 2, "shard": 2, **PLACED, "expert_slots": (ORDER, BACK), "checkpointing": "full"},
    ),
    "placed-two-stages": ("nemotron_h", {**TWO_STAGES, **CHUNKS, **PLACED, "expert_slots": (ORDER,)}),
    "copies": (
        "deepseek_v3",
        {"ep": 4, **PLACED, "redundant_experts": 1, "expert_slots": (COPIES, COPIES), "checkpointing": "full"},
    ),
    "copies-sharded": (
        "llama4",
        {"ep": 2, "shard": 2, **PLACED, "redundant_experts": 2, "expert_slots": (COPIES2, COPIES2)},
    ),
    "copies-replicated": (
        "nemotron_h",
        {"ep": 2, "replicate": 2, **PLACED, **SHARED, "redundant_experts": 2, "expert_slots": (COPIES2,)},
    ),
    "node-scope": ("deepseek_v3", {"shard": 4, "reshard_scope": "node"}),
    "node-scope-ep2": ("llama4", {"ep": 2, "shard": 2, "reshard_scope": "node", "checkpointing": "full"}),
}
"""Name → family and axes."""


@pytest.fixture(scope="module")
def families(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Families with shared experts, as transformers writes them: plain, behind a latent width, weighted before."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    made = {}
    for name, (stem, fields) in FAMILIES.items():
        config = getattr(transformers, f"{stem}{'Text' if name == 'llama4' else ''}Config")(**{**SMALL, **fields})
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
    return made


def two_nodes() -> ClusterRef:
    return ClusterRef(
        name="two-nodes",
        digest="ab" * 32,
        device_type="cpu",
        device_name="cpu",
        world_size=4,
        devices_per_node=2,
        backend="gloo",
    )


@pytest.fixture(scope="module")
def lines(
    families: Any, make_job: Any, strategy: Any, on_ranks: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """What the ranks say of each plan; every one was compared with one process there, to 1e-5."""
    recipe = {
        "batch": {"global_batch_sequences": 8},
        "lora": {"rank": 2, "alpha": "4", "targets": ["attention", "experts", "shared_experts"]},
    }
    jobs = []
    for family, axes in PLANS.values():
        planned = strategy(**axes, accumulation_steps=2)
        job = make_job(families[family], planned, recipe=recipe, cluster=two_nodes())
        jobs.append((family, str(job.plan_path), str(families[family].checkpoint)))
    path = tmp_path_factory.mktemp("axes") / "jobs.json"
    path.write_text(json.dumps(jobs))
    said = [line for line in on_ranks(4, "families.py", str(path)).splitlines() if "worst" in line]
    return dict(zip(PLANS, said, strict=True))


def worst(line: str) -> float:
    """The largest difference of a gradient's value that a line tells."""
    return float(line.split("worst ")[1].split()[0])


@pytest.mark.parametrize("name", [one for one in PLANS if one.startswith("two-stages")])
def test_two_stages_keep_gradients(name: str, lines: dict[str, str]) -> None:
    assert "uneven 1" in lines[name] and worst(lines[name]) < 1e-5


@pytest.mark.parametrize("name", [one for one in PLANS if one.startswith("shared")])
def test_shared_under_dispatch_keeps_gradients(name: str, lines: dict[str, str]) -> None:
    assert "uneven 1" in lines[name] and worst(lines[name]) < 1e-5


@pytest.mark.parametrize("name", [one for one in PLANS if one.startswith("both")])
def test_chunks_with_a_shared_expert_keep_gradients(name: str, lines: dict[str, str]) -> None:
    assert "uneven 1" in lines[name] and worst(lines[name]) < 1e-5


@pytest.mark.parametrize("name", [one for one in PLANS if one.startswith("padded")])
def test_padded_rows_keep_gradients(name: str, lines: dict[str, str]) -> None:
    """Uneven routing and experts without a row, whose adapters ranks/families.py finds without a gradient."""
    assert "uneven 1" in lines[name] and int(lines[name].split("empty ")[1]) > 0 and worst(lines[name]) < 1e-5


def test_some_recomputed_layers_keep_gradients(lines: dict[str, str]) -> None:
    """Layers 0 and 2 of three; ranks/families.py sees which ones are wrapped."""
    assert worst(lines["layers"]) < 1e-5


def test_prefetch_keeps_gradients(lines: dict[str, str]) -> None:
    """Two and four layers ahead; ranks/families.py sees what the first layer gathers."""
    assert max(worst(lines[name]) for name in ("prefetch2", "prefetch4")) < 1e-5


def test_placed_experts_keep_gradients(lines: dict[str, str]) -> None:
    """Each expert's adapter gets its own gradient, wherever the plan put it."""
    placed = [line for name, line in lines.items() if name.startswith("placed")]
    assert len(placed) == 3 and max(map(worst, placed)) < 1e-5


def test_copies_of_experts_keep_gradients(lines: dict[str, str]) -> None:
    """Copies share an expert's rows; their summed gradient is the expert's, and the norm counts it once."""
    copied = [line for name, line in lines.items() if name.startswith("copies")]
    assert len(copied) == 3 and max(map(worst, copied)) < 1e-5


def test_node_scope_keeps_gradients(lines: dict[str, str]) -> None:
    """After forward two of four ranks share the dense weights; ranks/families.py sees their groups."""
    assert max(worst(lines[name]) for name in ("node-scope", "node-scope-ep2")) < 1e-5


def test_a_recomputed_layer_keeps_only_its_input(families: Any, make_job: Any, strategy: Any) -> None:
    """What forward keeps falls by each named layer's own part, whatever the others do; gradients stay bit for bit."""
    example = families["deepseek_v3"]
    recipe = {"lora": {"rank": 2, "alpha": "4", "targets": ["attention", "experts", "shared_experts"]}}
    targets = make_job(example, strategy(), recipe=recipe).plan.decision.lora_targets
    ids = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(1))

    def kept(*layers: int) -> tuple[int, dict[str, torch.Tensor]]:
        model, files = load_plain(example.checkpoint, torch.float32, torch.device("cpu"))
        whole: dict[str, torch.Tensor] = {}
        for target in targets:
            for name, shape in zip(adapter_names(target), adapter_shapes(target), strict=True):
                whole[name] = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 0.2
        leaves = add_plain_lora(model, targets, whole, files.config.text_model_type)
        named = ParallelStrategy(mesh=Mesh(), checkpointing="layers" if layers else "none", checkpointed_layers=layers)
        checkpoint_layers(recomputed(list(decoder_layers(model).values()), named), LoadMeter())
        storages: dict[int, int] = {}

        def keep(value: torch.Tensor) -> torch.Tensor:
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        frozen = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *leaves.values()]}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            loss = summed_loss(model, ids)
        loss.backward()
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return sum(size for place, size in storages.items() if place not in frozen), gradients

    none, gradients = kept()
    saved = {layers: none - kept(*layers)[0] for layers in ((0,), (1,), (2,))}
    assert min(saved.values()) > 0
    total, again = kept(0, 2)
    boundary = ids.numel() * 32 * 4
    assert abs(none - total - saved[0,] - saved[2,]) <= boundary, "what two layers share is at most one hidden state"
    assert set(again) == set(gradients) and all(torch.equal(again[name], gradients[name]) for name in gradients)


def test_a_layer_that_is_not_there_is_refused() -> None:
    beyond = ParallelStrategy(mesh=Mesh(), checkpointing="layers", checkpointed_layers=(1, 3))
    with pytest.raises(LegalityError, match="layer 3, the model has 3"):
        recomputed([torch.nn.Identity()] * 3, beyond)


@pytest.mark.parametrize(
    ("mesh", "domain", "expected"),
    [
        ({"shard": 16}, 8, (8, 8)),
        ({"shard": 4, "ep": 4}, 8, (8, 2)),
        ({"shard": 2, "ep": 16}, 8, (8, False)),
        ({"shard": 2, "ep": 8}, 8, (8, False)),
    ],
)
def test_groups_after_forward_lie_in_a_domain(mesh: Any, domain: int, expected: Any) -> None:
    """Ranks of one expert's shards stand ep apart: so many of a domain's 8 ranks are among them."""
    plan = ParallelStrategy(mesh=Mesh(**mesh), reshard_scope="node")
    assert reshard_ranks(plan, domain) == expected
    assert reshard_ranks(plan.model_copy(update={"reshard_scope": "all"}), domain) == (True, True)
    for odd in (1, 3, 64):
        with pytest.raises(LegalityError, match="do not divide"):
            reshard_ranks(plan, odd)
