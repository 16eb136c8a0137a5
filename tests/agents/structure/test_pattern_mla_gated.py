"""Gated latent attention without rotation, in Kimi K3's own modules and in near misses of our own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.agents.structure.canonical import canonical_graphs
from shardwright.agents.structure.capture import capture_model
from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.opaque_indexers import FEW, opaque_indexers
from shardwright.agents.structure.patterns.mla_gated import GatedLatentAttention
from shardwright.agents.structure.rank import Target, variants
from shardwright.agents.structure.testkit import PatternContract, captured_example, meta
from shardwright.checkpoints.models.kimi_k3 import attention as k3
from shardwright.checkpoints.models.kimi_k3.configuration import KimiK3TextConfig
from shardwright.checkpoints.models.kimi_k3.model import KimiK3ForCausalLM
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.schemas.profile import LayerKind
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.providers import provider_cost

pytest.importorskip("triton", reason="the operator's contract stands beside its kernels")

B, S, HIDDEN = 2, 12, 64
CONFIG = SimpleNamespace(
    hidden_size=HIDDEN,
    num_attention_heads=4,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=16,
    kv_lora_rank=16,
    q_lora_rank=24,
    latent_norm_eps=1e-6,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=64,
)

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "attn_res_block_size": 2,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 64,
    "linear_attn_config": {
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "full_attn_layers": [2, 3],
        "kda_layers": [1],
        "sparse_attn_layers": [3],
    },
}


class Layer(nn.Module):
    """An attention inside a layer, as the model calls it."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.self_attn = kind(CONFIG)

    def forward(self, x: Tensor, *mask: Tensor) -> Tensor:
        return x + self.self_attn(x, *mask)


Example = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


def example(kind: type[nn.Module], *, masked: bool = False) -> Example:
    given = (meta(B, S, HIDDEN), *((meta(B, 1, S, S, dtype=torch.bool),) if masked else ()))
    return lambda: (Layer(kind), given)


class Otherwise(k3.GatedLatentAttention):
    """The same with one thing done otherwise."""

    way = ""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
        way = self.way
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(B, S, self.heads, -1).transpose(1, 2)
        latent, extra = self.kv_a_proj_with_mqa(x).split([self.rank, self.extra], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).view(B, S, self.heads, -1).transpose(1, 2)
        nope, v = both.split([self.nope, self.value], dim=-1)
        shared = extra.unsqueeze(1).expand(-1, self.heads, -1, -1)
        k = torch.cat([shared, nope] if way == "shared-part-first" else [nope, shared], dim=-1)
        p = 0.1 if way == "dropout" else 0.0
        o = F.scaled_dot_product_attention(q, k, v, is_causal=way != "sees-the-future", dropout_p=p)
        raw = self.g_proj(x)
        gate = F.silu(raw) if way == "silu-gate" else torch.sigmoid(raw.float() * (2 if way == "steep-gate" else 1))
        gate = gate.to(x.dtype)
        mixed = o.transpose(1, 2).reshape(B, S, -1)
        y = self.o_proj(mixed + gate if way == "added-gate" else mixed * gate)
        return (y, mixed.sum()) if way == "ungated-read" else y


def near(way: str) -> Example:
    kind = type("Otherwise", (Otherwise,), {"way": way})

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = kind(CONFIG)

        def forward(self, x: Tensor) -> Any:
            return self.self_attn(x)

    return lambda: (Whole(), (meta(B, S, HIDDEN),))


class TestGatedLatentAttention(PatternContract):
    pattern = GatedLatentAttention()
    positives = {
        "sparse": (example(k3.GatedSparseAttention), 1),
        "sparse-documents": (example(k3.GatedSparseAttention, masked=True), 1),
        "dense": (example(k3.GatedLatentAttention), 1),
        "dense-documents": (example(k3.GatedLatentAttention, masked=True), 1),
        "our-own-spelling": (near(""), 1),
    }
    near_misses = {
        way: near(way)
        for way in (
            "sees-the-future",
            "shared-part-first",
            "dropout",
            "silu-gate",
            "added-gate",
            "ungated-read",
        )
    }


def only(made: Example) -> Any:
    captured, graph, facts = captured_example(made)
    (match,) = GatedLatentAttention().find(captured, graph)
    return match, certify(match, facts)


def test_what_a_worker_needs_is_bound() -> None:
    match, _ = only(example(k3.GatedSparseAttention, masked=True))
    assert match.roles["gate"] == "g_proj" and match.roles["index_norm"] == "indexer.k_norm"
    assert {*match.roles.values()} >= {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_b_proj.weight", "o_proj"}
    c = match.constants
    assert (c["form"], c["top_k"], c["k"], c["call"], c["layout"]) == ("own", 64, FEW, "mask", "none")
    assert c["index_scale"] == pytest.approx((4 * 32) ** -0.5) and c["scale"] == pytest.approx(16**-0.5)
    assert c["not_plain"] == ""
    dense, _ = only(example(k3.GatedLatentAttention))
    assert (dense.constants["form"], dense.constants["top_k"]) == ("dense", 0)


def test_a_module_that_computes_more_is_legal_but_not_installed() -> None:
    """A gate that is doubled before its sigmoid: the region takes it as it is, the module is another."""
    match, certificate = only(near("steep-gate"))
    assert certificate.legal
    (kernel,) = (spec for spec in match.pattern.variants() if spec.provider == "shardwright")
    assert "gate is not a projection's result" in match.pattern.refuses(match, kernel)


def test_a_sparing_attention_is_captured_with_its_indexer_and_left_as_it_was() -> None:
    layer = Layer(k3.GatedSparseAttention)
    with opaque_indexers(layer):
        assert layer.self_attn.indexer.index_topk == FEW
    assert layer.self_attn.indexer.index_topk == 64


def test_a_capture_without_the_modules_indexer_is_not_installed() -> None:
    """A class that leaves out its indexer and is not known to: what was captured is right for short rows only."""
    kind = type("Unknown", (k3.GatedSparseAttention,), {})
    match, certificate = only(example(kind))
    assert certificate.legal and match.constants["form"] == "dense"
    (kernel,) = (spec for spec in match.pattern.variants() if spec.provider == "shardwright")
    assert "longer rows are another function" in match.pattern.refuses(match, kernel)


def test_variants_are_ranked_and_say_how_they_run(mixtral_folder: Path, recipe: Any) -> None:
    """Ours is a library's attention with one pass of the gate in place of four: a little less than eager's time."""
    target = Target(load_cluster("h200-1"), profile_checkpoint(mixtral_folder), recipe)
    for kind, said in ((k3.GatedLatentAttention, "no indexer"), (k3.GatedSparseAttention, "run sparse")):
        match, _ = only(example(kind, masked=True))
        if kind is k3.GatedSparseAttention:
            match.constants["top_k"] = 64
            assert recipe.batch.sequence_tokens > 64
        kernel = {v.name: v for v in variants(match, target, adapted=True)}["kernel"]
        assert kernel.available, kernel.unavailable_because
        assert kernel.gain is not None and kernel.gain.origin == "modelled" and kernel.gain.speedup > 1
        assert said in kernel.way
    cpu = Target(load_cluster("cpu-2"), target.profile, recipe)
    on_cpu = {v.name: v for v in variants(match, cpu, adapted=True)}["kernel"]
    assert on_cpu.unavailable_because == "needs cuda; the cluster has cpu"


def test_the_gates_cost_by_hand() -> None:
    """Dense ours is eager's but for the gate: bf16 values in, out, and fp32 between for eager."""
    shape = {"T": 128, "H": 4, "A": 8, "B": 16, "R": 8, "V": 32, "N": 0, "D": 0, "K": 0}
    eager, ours = (provider_cost("mla_gated", name, shape, "bfloat16") for name in ("eager", "shardwright"))
    n = 128 * 4 * 16
    assert eager.backward is not None and ours.backward is not None
    moved = [one.bytes_read + one.bytes_written for one in (eager.forward, ours.forward, eager.backward, ours.backward)]
    assert moved[0] - moved[1] == n * (2 + 4 + 4 + 4 + 4 + 2)
    assert moved[2] - moved[3] == n * (6 + 6 + 2 + 4 + 8 + 4 + 4 + 2) - n * 10
    assert (eager.forward.launches - ours.forward.launches, eager.backward.launches - ours.backward.launches) == (3, 4)
    assert eager.forward.flops == ours.forward.flops and eager.forward.floor_bytes == ours.forward.floor_bytes


def test_the_whole_model_of_this_project() -> None:
    """Kimi K3 with a sparse slot: every latent attention is found, each of its kind."""
    config = KimiK3TextConfig(**TINY)
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config).to(torch.bfloat16)
    kinds = tuple(
        LayerKind(name=name, attention="full", mlp="moe", layer_indices=(at,), parameters=1)
        for at, name in enumerate(("linear", "dense", "sparse"))
    )
    pairs = canonical_graphs(capture_model(model, kinds, 3))
    found = [match for one, graph in pairs if graph for match in GatedLatentAttention().find(one, graph)]
    forms = {match.modules()[0]: match.constants["form"] for match in found}
    assert forms == {"model.layers.1.self_attn": "dense", "model.layers.2.self_attn": "own"}
    assert all(match.constants["not_plain"] == "" and match.constants["call"] == "mask" for match in found)
