"""Sparse latent attention over pools of keys, in glm5_next's own modules and in near misses of our own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig

from shardwright.agents.structure.canonical import canonical_graphs
from shardwright.agents.structure.capture import capture_model
from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.opaque_indexers import PARAMETERS, opaque_indexers, run_choice
from shardwright.agents.structure.patterns.dsa_pooled import PooledSparseAttention
from shardwright.agents.structure.patterns.dsa_pooled_cases import case
from shardwright.agents.structure.patterns.dsa_pooled_spelling import choice_formula
from shardwright.agents.structure.rank import Target, variants
from shardwright.agents.structure.testkit import PatternContract, captured_example, meta
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.schemas.profile import LayerKind
from shardwright.schemas.recipe import LoraSpec
from shardwright.search_spaces.catalogue import load_cluster

modelling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
pytest.importorskip("triton", reason="the operator's contract stands beside its kernels")

B, S, HIDDEN, POOL, TOP_K = 2, 12, 64, 2, 4
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 0,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": TOP_K,
    "index_kpool": POOL,
    "num_hidden_layers": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "layer_types": ["linear_attention", *(["indexed_attention"] * 3)],
    "indexer_types": ["full", "full", "full", "shared"],
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "vocab_size": 264,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
OWN, HANDS_ON, SHARED = 1, 2, 3
"""Layers: with an indexer of its own, with one whose choice the next layer takes, and that layer."""


def configuration(**changes: Any) -> Any:
    config = AutoConfig.for_model("glm5_next_text", **{**SIZES, **changes})
    config._attn_implementation = "sdpa"
    return config


class Layer(nn.Module):
    """The family's attention, called with tensors alone."""

    def __init__(self, at: int = OWN, **changes: Any) -> None:
        super().__init__()
        self.self_attn = modelling.Glm5NextTextAttention(configuration(**changes), at)

    def forward(self, x: Tensor, valid: Tensor, *handed: Tensor) -> Any:
        more = {"prev_topk_indices": handed[0]} if handed else {}
        out, _, indices = self.self_attn(x, valid, **more)
        return (x + out,) if indices is None else (x + out, indices)


def tensors(handed: int = 0) -> tuple[Tensor, ...]:
    given = (meta(B, S, HIDDEN), meta(B, S, dtype=torch.bool))
    return (*given, meta(B, S, handed, dtype=torch.int32)) if handed else given


def family(at: int = OWN, **changes: Any) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    return lambda: (Layer(at, **changes), tensors(TOP_K + POOL - 1 if at == SHARED else 0))


class Otherwise(nn.Module):
    """The family's attention with one thing done otherwise around its own indexer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inner = modelling.Glm5NextTextAttention(configuration(), OWN)

    def forward(self, x: Tensor, valid: Tensor) -> Any:
        a, way = self.inner, self.way
        q_latent = a.q_a_layernorm(a.q_a_proj(x))
        query = a.q_b_proj(q_latent).view(B, S, -1, 8).transpose(1, 2)
        kv, k_rot = torch.split(a.kv_a_proj_with_mqa(x), [16, 0], dim=-1)
        latent = a.kv_a_layernorm(kv).view(B, 1, S, 16)
        key, value = a.expand_kv(latent, k_rot.view(B, 1, S, 0))
        read = x * 2 if way == "indexer-reads-another-value" else x
        chosen = a.indexer(read, q_latent, valid, None)
        in_range = chosen.ge(0) if way == "no-upper-bound" else chosen.ge(0) & chosen.lt(S)
        low = 1 if way == "first-key-lost" else 0
        counts = torch.zeros(B, S, S, dtype=torch.int32, device=x.device)
        counts.scatter_add_(-1, chosen.clamp(low, S - 1), in_range.to(torch.int32))
        mask = (counts.eq(0) if way == "the-rest" else counts.ne(0)).unsqueeze(1)
        value = value * 2 if way == "scaled-values" else value
        o = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=0.3, dropout_p=0.1 if way == "dropout" else 0.0
        )
        y = a.o_proj(o.transpose(1, 2).reshape(B, S, -1))
        return (y, mask) if way == "mask-read-outside" else y


def near(way: str) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    return lambda: (Otherwise(way), tensors())


class TestPooledSparseAttention(PatternContract):
    pattern = PooledSparseAttention()
    positives = {
        "own": (family(), 1),
        "hands-its-choice-on": (family(HANDS_ON), 1),
        "shared": (family(SHARED), 1),
        "no-pool-left-out-in-the-capture": (family(index_topk=64, index_kpool=16), 1),
        "our-own-spelling": (near(""), 1),
    }
    near_misses = {
        way: near(way)
        for way in ("no-upper-bound", "first-key-lost", "the-rest", "scaled-values", "dropout", "mask-read-outside")
    }


def only(example: Callable[[], Any]) -> Any:
    captured, graph, facts = captured_example(example)
    (match,) = PooledSparseAttention().find(captured, graph)
    return match, certify(match, facts)


def test_what_a_worker_needs_is_bound() -> None:
    match, _ = only(family())
    assert match.roles["index_norm"] == "indexer.k_norm" and match.roles["kv_b_weight"] == "kv_b_proj.weight"
    assert match.roles["pool_gate"] == "indexer.index_kpool_compress_gate"
    assert {*match.roles.values()} >= {"q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}
    c = match.constants
    assert (c["top_k"], c["pool"], c["tail"], c["rope"], c["hands_on"]) == (TOP_K, POOL, True, 0, False)
    assert c["not_plain"] == "" and c["index_scale"] == pytest.approx((4 * 32) ** -0.5)
    assert only(family(HANDS_ON))[0].constants["hands_on"]
    handed, _ = only(family(SHARED))
    assert (handed.constants["form"], handed.constants["top_k"], handed.constants["pool"]) == ("shared", TOP_K, POOL)


def test_a_choice_that_takes_every_captured_pool_is_examined_with_smaller_ones() -> None:
    """Twelve captured tokens are no pool of sixteen: the choice would else prove nothing."""
    _, certificate = only(family(index_topk=64, index_kpool=16))
    (test,) = (o for o in certificate.obligations if o.name == "differential-test")
    assert test.status == "proved" and "with 2 of 6 pools of 2 too" in test.evidence


def test_the_leaf_runs_the_familys_own_class() -> None:
    """What stands for the indexer in fp64 is what the module itself chooses; the formula chooses the same."""
    torch.manual_seed(3)
    indexer = modelling.Glm5NextTextIndexer(configuration(), 0).double()
    values = case("normal", 0, _shapes(indexer), {"index_heads": 4})
    with torch.no_grad():
        for name, role in zip(PARAMETERS, ROLES, strict=True):
            indexer.get_parameter(name).copy_(values[role])
    given = (values["hidden"], values["q_latent"], values["valid"])
    own = indexer(*given, None)
    rule = f"{type(indexer).__module__}:Glm5NextTextIndexer"
    numbers: dict[str, Any] = {"heads": 4, "top_k": TOP_K, "pool": POOL, "tail": True}
    leaf = run_choice(rule, (*given, *(values[role] for role in ROLES)), **numbers)
    assert torch.equal(own.sort(-1).values, leaf.sort(-1).values) and own.shape[-1] == TOP_K + POOL - 1
    chosen = choice_formula(values, {"pool": POOL, "k": TOP_K, "tail": True, "index_heads": 4, "index_scale": 1.0})
    assert int(chosen[0, -1].sum()) == TOP_K and not bool(chosen[0].triu(1).any())
    assert all({*own[0, t].tolist()} - {-1} == {*chosen[0, t].nonzero().flatten().tolist()} for t in range(S))


ROLES = (
    "index_q_weight",
    "index_k_weight",
    "index_norm_weight",
    "index_norm_bias",
    "index_weights_weight",
    "pool_position",
    "pool_gate",
)


def _shapes(indexer: nn.Module) -> dict[str, tuple[int, ...]]:
    parameters = {role: tuple(indexer.get_parameter(name).shape) for name, role in zip(PARAMETERS, ROLES, strict=True)}
    region = {"q": (B, S, 32), "latent": (B, S, 16), "kv_b_weight": (96, 16)}
    return {**parameters, **region, "hidden": (B, S, HIDDEN), "q_latent": (B, S, 24), "valid": (B, S)}


def test_an_indexer_that_is_called_with_a_cache_is_no_leaf() -> None:
    layer = Layer()
    given = (torch.zeros(1, 4, HIDDEN), torch.zeros(1, 4, 24), torch.ones(1, 4).bool())
    with opaque_indexers(layer), pytest.raises(AttributeError, match="layers"):
        layer.self_attn.indexer(*given, object())
    assert "forward" not in layer.self_attn.indexer.__dict__


def test_a_module_that_computes_more_is_legal_but_not_installed() -> None:
    """The region is right whatever its indexer reads; the module is another."""
    match, certificate = only(near("indexer-reads-another-value"))
    assert certificate.legal, certificate.refused_because()
    (kernel,) = (spec for spec in match.pattern.variants() if spec.provider == "shardwright")
    assert "read different values" in match.pattern.refuses(match, kernel)


def test_variants_say_why_they_are_not_offered(mixtral_folder: Path, recipe: Any) -> None:
    profile = profile_checkpoint(mixtral_folder)
    match, _ = only(family())
    on_gpu = {v.name: v for v in variants(match, Target(load_cluster("h200-1"), profile, recipe), adapted=True)}
    assert on_gpu["kernel"].available and on_gpu["kernel"].gain is not None
    assert on_gpu["kernel"].gain.origin == "modelled" and on_gpu["kernel"].gain.speedup > 1
    on_cpu = {v.name: v for v in variants(match, Target(load_cluster("cpu-2"), profile, recipe), adapted=True)}
    assert on_cpu["kernel"].unavailable_because == "needs cuda; the cluster has cpu"
    dropped = recipe.model_copy(update={"lora": LoraSpec(targets=("attention",), dropout="0.1")})
    refused = {v.name: v for v in variants(match, Target(load_cluster("h200-1"), profile, dropped), adapted=True)}
    assert "dropout" in refused["kernel"].unavailable_because
    tailless, _ = only(family(index_kpool_always_select_tail=False))
    without = {v.name: v for v in variants(tailless, Target(load_cluster("h200-1"), profile, recipe), adapted=False)}
    assert "would see nothing" in without["kernel"].unavailable_because


def test_the_whole_model_of_the_family() -> None:
    """As shipped, with hyper-connections and delta-rule layers: captured, and every sparse layer found."""
    config = AutoConfig.for_model("glm5_next", text_config=SIZES)
    with torch.device("meta"):
        model = modelling.Glm5NextForConditionalGeneration._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    kinds = tuple(
        LayerKind(name=name, attention="full", mlp="moe", layer_indices=places, parameters=1)
        for name, places in (("linear", (0,)), ("sparse", (1, 2, 3)))
    )
    pairs = canonical_graphs(capture_model(model, kinds, 4))
    assert all(graph is not None for _, graph in pairs), [one.reason for one, _ in pairs]
    found = [match for one, graph in pairs if graph for match in PooledSparseAttention().find(one, graph)]
    assert sorted(place for match in found for place in match.modules()) == [
        f"model.language_model.layers.{at}.self_attn" for at in (1, 2, 3)
    ]
    assert all(match.constants["not_plain"] == "" for match in found)
    handing = {place for match in found if match.constants["hands_on"] for place in match.modules()}
    assert handing == {"model.language_model.layers.2.self_attn"}
