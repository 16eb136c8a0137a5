"""Sparse latent attention with its indexer, in the families' own modules and in near misses of our own."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.choose import choose
from shardwright.agents.structure.flatten import flatten
from shardwright.agents.structure.join import recertify
from shardwright.agents.structure.patterns.dsa import SparseLatentAttention
from shardwright.agents.structure.patterns.dsa_cases import two_documents
from shardwright.agents.structure.propose import propose
from shardwright.agents.structure.rank import Target, variants
from shardwright.agents.structure.testkit import PatternContract, captured_example, meta
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.recipe import IndexerSpec, LoraSpec
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster

pytest.importorskip("triton", reason="the operator's contract stands beside its kernels")

B, S, HIDDEN, ROPE = 2, 12, 64, 8
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 4,
    "num_hidden_layers": 3,
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
CLASSES = {"deepseek_v32": "DeepseekV32Attention", "glm_moe_dsa": "GlmMoeDsaAttention", "hy_v4": "HYV4Attention"}


class Layer(nn.Module):
    """A family's attention, called with tensors alone."""

    def __init__(self, family: str, layer: int = 0, attention: str = "sdpa", **changes: Any) -> None:
        super().__init__()
        sizes = {**SIZES, **changes}
        if family != "deepseek_v32":
            sizes["indexer_types"] = ["full", "full", "shared"]
        config = AutoConfig.for_model(family, **sizes)
        config._attn_implementation = attention
        modelling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
        self.self_attn = getattr(modelling, CLASSES[family])(config, layer)
        indexer = self.self_attn.indexer
        if indexer is not None:
            indexer.forward = types.MethodType(_without_no_grad(type(indexer).forward), indexer)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, *handed: Tensor) -> Any:
        more = {"prev_topk_indices": handed[0]} if handed else {}
        out = self.self_attn(x, (cos, sin), mask, **more)
        return (x + out[0], *out[2:])


def _without_no_grad(forward: Any) -> Any:
    """The function under its decorators: a block without gradients is the matter of another test."""
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def tensors(kind: torch.dtype = torch.bool, chosen: int = 0) -> tuple[Tensor, ...]:
    given = (meta(B, S, HIDDEN), meta(1, S, ROPE), meta(1, S, ROPE), meta(B, 1, S, S, dtype=kind))
    return (*given, meta(B, S, chosen, dtype=torch.int32)) if chosen else given


def family(name: str, layer: int = 0, **changes: Any) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    def example() -> tuple[nn.Module, tuple[Tensor, ...]]:
        eager = name == "hy_v4"
        handed = SIZES["index_topk"] if layer == 2 else 0
        made = Layer(name, layer, "eager" if eager else "sdpa", **changes)
        return made, tensors(torch.bfloat16 if eager else torch.bool, handed)

    return example


class Ours(nn.Module):
    """The same attention in our own spelling, with one thing done otherwise."""

    def __init__(self, otherwise: str = "") -> None:
        super().__init__()
        self.otherwise = otherwise
        self.q_proj, self.kv_proj = nn.Linear(HIDDEN, 64, bias=False), nn.Linear(HIDDEN, 24, bias=False)
        self.kv_b_proj, self.o_proj = nn.Linear(16, 96, bias=False), nn.Linear(64, HIDDEN, bias=False)
        self.iq, self.ik, self.iw = (nn.Linear(HIDDEN, n, bias=False) for n in (64, 16, 4))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first = x[..., :half] if self.otherwise == "rotates-backwards" else -x[..., half:]
        second = -x[..., half:] if self.otherwise == "rotates-backwards" else x[..., :half]
        return x * cos + torch.cat((first, second), dim=-1) * sin

    def choose(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        way = self.otherwise
        q, k = self.iq(x).view(B, S, 4, 16), self.ik(x).unsqueeze(2)
        c, s = cos.unsqueeze(2), sin.unsqueeze(2)
        q = torch.cat([self.turn(q[..., :ROPE], c, s), q[..., ROPE:]], dim=-1)
        k = torch.cat([self.turn(k[..., :ROPE], c, s), k[..., ROPE:]], dim=-1).squeeze(2)
        dots = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1)) * 0.25
        dots = dots.abs() if way == "no-relu" else F.relu(dots)
        weights = self.iw(x).float() * 0.5
        weights = weights.softmax(-1) if way == "softmax-weights" else weights
        total = torch.matmul(weights.unsqueeze(-2), dots).squeeze(-2)
        if way == "additive-bias":
            total = total + total.mean(-1, keepdim=True)
        if way != "choice-sees-the-future":
            total = total.masked_fill(~mask[:, 0], float("-inf"))
        return total.topk(4, dim=-1, largest=way != "worst-keys").indices.to(torch.int32)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Any:
        way = self.otherwise
        heads = self.q_proj(x).view(B, S, -1, 16).transpose(1, 2)
        latent, k_rot = self.kv_proj(x).split([16, ROPE], dim=-1)
        q_pass, q_rot = torch.split(heads, [8, ROPE], dim=-1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        q_rot, k_rot = self.turn(q_rot, c, s), self.turn(k_rot.reshape(B, 1, S, ROPE), c, s)
        kv = self.kv_b_proj(latent.reshape(B, 1, S, 16)).view(B, S, -1, 24).transpose(1, 2)
        k_pass, value = torch.split(kv, [8, 16], dim=-1)
        key = kv.new_empty(*kv.shape[:-1], 16)
        key[..., :8].copy_(k_pass)
        key[..., 8:].copy_(k_rot.expand(-1, 4, -1, -1))
        chosen = self.choose(x, cos, sin, mask)
        left_out = chosen.new_ones((B, S, S), dtype=torch.bool).scatter(-1, chosen.long(), False).unsqueeze(1)
        allowed = mask if way == "choice-ignored" else mask & (left_out if way == "the-rest" else ~left_out)
        value = value * 2 if way == "scaled-values" else value
        o = F.scaled_dot_product_attention(
            torch.cat((q_pass, q_rot), dim=-1),
            key,
            value,
            attn_mask=allowed,
            scale=0.25,
            dropout_p=0.1 if way == "dropout" else 0.0,
        )
        y = self.o_proj(o.transpose(1, 2).reshape(B, S, -1))
        return (y, allowed) if way == "mask-read-outside" else y


def near(otherwise: str) -> Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]:
    return lambda: (Ours(otherwise), tensors())


class TestSparseLatentAttention(PatternContract):
    pattern = SparseLatentAttention()
    positives = {
        "deepseek_v32": (family("deepseek_v32"), 1),
        "glm_moe_dsa": (family("glm_moe_dsa"), 1),
        "glm_moe_dsa-shared": (family("glm_moe_dsa", 2), 1),
        "hy_v4-gate-and-sinks": (family("hy_v4"), 1),
        "all-keys-chosen-in-the-capture": (family("deepseek_v32", index_topk=64), 1),
        "our-own-spelling": (near(""), 1),
    }
    near_misses = {
        name: near(name)
        for name in (
            "no-relu",
            "additive-bias",
            "choice-sees-the-future",
            "worst-keys",
            "choice-ignored",
            "the-rest",
            "scaled-values",
            "dropout",
            "mask-read-outside",
            "rotates-backwards",
        )
    }


def only(example: Callable[[], Any]) -> Any:
    captured, graph, facts = captured_example(example)
    (match,) = SparseLatentAttention().find(captured, graph)
    return match, certify(match, facts)


def test_what_a_worker_needs_is_bound() -> None:
    match, _ = only(family("deepseek_v32"))
    assert match.roles["index_norm"] == "indexer.k_norm" and match.roles["kv_b_weight"] == "kv_b_proj.weight"
    assert {*match.roles.values()} >= {"q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}
    c = match.constants
    assert (c["layout"], c["index_layout"], c["index_first"]) == ("interleaved", "half-split", True)
    assert (c["top_k"], c["hands_on"], c["not_plain"]) == (4, False, "")
    assert c["index_scale"] == pytest.approx((4 * 16) ** -0.5)
    handed, _ = only(family("glm_moe_dsa", 2))
    assert handed.constants["form"] == "shared" and handed.constants["hands_on"]
    assert only(family("hy_v4"))[0].constants["index_first"] is False


def test_a_choice_that_takes_every_captured_key_is_examined_with_fewer() -> None:
    """Twelve captured tokens of a model that selects 64: the choice would else prove nothing."""
    _, certificate = only(family("deepseek_v32", index_topk=64))
    (test,) = (o for o in certificate.obligations if o.name == "differential-test")
    assert test.status == "proved" and "with 5 of 12 keys too" in test.evidence


@pytest.mark.parametrize("otherwise", ["", "softmax-weights"])
def test_a_module_that_computes_more_is_legal_but_not_installed(otherwise: str) -> None:
    """Keys straight from the projection, weights through a softmax: the region is right, the module is another."""
    match, certificate = only(near(otherwise))
    assert certificate.legal
    (kernel,) = (spec for spec in match.pattern.variants() if spec.provider == "shardwright")
    assert "more than projections and norms" in match.pattern.refuses(match, kernel)


def test_variants_say_why_they_are_not_offered(mixtral_folder: Path, recipe: Any) -> None:
    profile = profile_checkpoint(mixtral_folder)
    match, _ = only(family("deepseek_v32"))
    on_gpu = {v.name: v for v in variants(match, Target(load_cluster("h200-1"), profile, recipe), adapted=True)}
    assert on_gpu["kernel"].available and on_gpu["kernel"].gain is not None
    assert on_gpu["kernel"].gain.origin == "modelled" and on_gpu["kernel"].gain.speedup > 1
    on_cpu = {v.name: v for v in variants(match, Target(load_cluster("cpu-2"), profile, recipe), adapted=True)}
    assert on_cpu["kernel"].unavailable_because == "needs cuda; the cluster has cpu"
    dropped = recipe.model_copy(update={"lora": LoraSpec(targets=("attention",), dropout="0.1")})
    refused = {v.name: v for v in variants(match, Target(load_cluster("h200-1"), profile, dropped), adapted=True)}
    assert "dropout" in refused["kernel"].unavailable_because
    wide, _ = only(family("deepseek_v32", kv_lora_rank=1024))
    outside = {v.name: v for v in variants(wide, Target(load_cluster("h200-1"), profile, recipe), adapted=False)}
    assert outside["kernel"].unavailable_because == "q_nope is 1024 wide"


def test_the_decision_of_a_plan_says_it(mixtral_folder: Path, recipe: Any) -> None:
    """In the reason that is hashed with the decision and shown in the report; other regions say nothing of the kind."""
    captured, graph, facts = captured_example(family("deepseek_v32"))
    matches = SparseLatentAttention().find(captured, graph)
    cluster, profile = load_cluster("h200-1"), profile_checkpoint(mixtral_folder)
    proposals = propose(matches, facts, Target(cluster, profile, recipe))
    (proposal,), (decision,) = recertify(proposals, ParallelStrategy(mesh=Mesh()), cluster, recipe)
    assert decision.variant == "kernel" and decision.reason == proposal.reason
    assert f"rows of {recipe.batch.sequence_tokens} tokens run sparse (dense up to 4 tokens a row" in decision.reason
    learning = recipe.model_copy(update={"indexer": IndexerSpec(loss="0.1")})
    (taught,) = propose(matches, facts, Target(cluster, profile, learning))
    assert "the indexer learns from the sparse attention" in choose(taught, cluster, Mesh()).reason
    for settings, said in (
        ({"loss": "0.1", "stage": "dense"}, "run dense: the indexers' warm-up attends to all keys"),
        ({"attention": "faster"}, "the faster way that the recipe allows: "),
        ({"scores": "fp8"}, "the indexer scores in fp8, so what it selects is an approximation"),
    ):
        set_so = recipe.model_copy(update={"indexer": IndexerSpec(**settings)})
        (told,) = propose(matches, facts, Target(cluster, profile, set_so))
        assert said in choose(told, cluster, Mesh()).reason and said not in proposal.reason
    captured, graph, facts = captured_example(family("hy_v4"))
    (sunk,) = propose(SparseLatentAttention().find(captured, graph), facts, Target(cluster, profile, recipe))
    assert "take no sinks" in sunk.reason
    dense = recipe.model_copy(update={"indexer": IndexerSpec(loss="0.1", stage="dense")})
    with pytest.raises(LegalityError, match="attends with sinks") as refused:
        propose(SparseLatentAttention().find(captured, graph), facts, Target(cluster, profile, dense))
    assert refused.value.code == "legality/indexer-stage-dense"


def test_documents_of_the_cases_are_two() -> None:
    seen = two_documents((B, 1, S, S), torch.bool)
    assert int(seen[0].sum()) == S * (S + 1) // 2 and not bool(seen[1, 0, S // 3, 0])


def _inlines_blocks() -> bool:
    """Whether values cross the border of a block without gradients."""

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = x * 2
            return x + y

    program = torch.export.export(Block(), (torch.ones(2),), strict=False)
    return sum(node.op == "placeholder" for node in flatten(program.graph_module).nodes) == 1


@pytest.mark.skipif(not _inlines_blocks(), reason="inlined blocks without gradients lose their operands")
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_whole_models_of_the_families(name: str, captured: Callable[[Any], Any]) -> None:
    """As shipped: the indexer under no_grad; every layer is found, one graph for each kind."""
    importlib.import_module(f"transformers.models.{name}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES), dtype=torch.bfloat16)
    found = [match for pair in captured(model) if pair[1] for match in SparseLatentAttention().find(*pair)]
    assert sorted(place for match in found for place in match.modules()) == [
        f"model.layers.{at}.self_attn" for at in range(3)
    ]
    assert all(match.constants["not_plain"] == "" for match in found)
