"""A sequence cut over ranks: what Kimi K3's layers exchange, compute and hold, against closed forms of its sizes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from models import kimi_k3, recipe_for, targets_for

from shardwright.schemas.cost import CostReport
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import context, price, workload
from shardwright.search_spaces.cost.attention_time import MASK_BYTES, attention_time
from shardwright.search_spaces.cost.compute import Rates
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.plans import plans_of
from shardwright.search_spaces.legality import violations
from shardwright.search_spaces.space import legal_strategies

S = 1 << 20
HEADS, NOPE, ROPE, VALUE, LATENT, D = 96, 128, 64, 128, 512, 128
"""Kimi K3's latent attention, and the width of a head of its delta rule."""
FUSED = FusedProviders({"kda": ("shardwright", ()), "linear_cross_entropy": ("shardwright", ("lm_head",))})


@pytest.fixture(scope="module")
def k3() -> SimpleNamespace:
    model = kimi_k3("mxfp4")
    recipe = recipe_for(batch=4, tokens=S)
    work = workload(model, recipe, targets_for(model, rank=16))
    kinds = {layer.kind.name: layer for layer in work.layers}
    return SimpleNamespace(model=model, recipe=recipe, work=work, kinds=kinds)


def plan(cp: int, **mesh: int) -> ParallelStrategy:
    return ParallelStrategy(mesh=Mesh(ep=128 // cp, cp=cp, **mesh), checkpointing="full", base_format="mxfp4")


def columns(k3: SimpleNamespace, *degrees: int) -> tuple[Any, Any]:
    plans = plans_of([plan(cp) for cp in degrees], k3.model)
    return plans, plans.tokens(S)


def of_kind(k3: SimpleNamespace, attention: str) -> Any:
    return next(layer for layer in k3.work.layers if layer.kind.attention == attention)


def test_delta_rule_passes_states_whose_size_no_sequence_changes(k3: SimpleNamespace) -> None:
    """[N | M], 96 × 128 × 256 fp32 numbers for each of 2·cp pieces; back as many."""
    plans, tokens = columns(k3, 1, 8, 32)
    forward, backward = context.exchanged_bytes(k3.work, of_kind(k3, "linear"), plans, tokens)
    assert forward.tolist() == [0, *(2 * cp * HEADS * D * (D + D) * 4 for cp in (8, 32))]
    assert np.array_equal(backward, forward)
    half = context.exchanged_bytes(k3.work, of_kind(k3, "linear"), plans, tokens / 2)
    assert np.array_equal(half[0], forward)


def test_latent_attention_gathers_576_values_a_token(k3: SimpleNamespace) -> None:
    """1.2 GB of a million tokens at any degree, where expanded keys and values would be 64 GB.

    Backward gathers them again and sums their gradient in fp32 (``runtime/context_gathered.py``).
    """
    plans, tokens = columns(k3, 8, 32)
    forward, backward = context.exchanged_bytes(k3.work, of_kind(k3, "mla"), plans, tokens)
    assert forward.tolist() == [2 * S * (LATENT + ROPE)] * 2
    assert backward.tolist() == [(2 + 4) * S * (LATENT + ROPE)] * 2


def test_what_a_cut_sequence_computes_besides(k3: SimpleNamespace) -> None:
    """Latent: the others' tokens through kv_b. Delta rule: once more, over values and keys."""
    plans, tokens = columns(k3, 1, 32)
    forward, backward = context.further_flops(k3.work, of_kind(k3, "mla"), plans, FUSED, tokens)
    others = S - S // 32
    assert forward.tolist() == [0, 2 * others * LATENT * HEADS * (NOPE + VALUE)]
    assert np.array_equal(backward, 2 * forward)
    states, again = context.further_flops(k3.work, of_kind(k3, "linear"), plans, FUSED, tokens)
    assert states.tolist() == [0, S // 32 * HEADS * 8 * D * 2 * D]
    assert np.array_equal(again, 2 * states)
    assert context.attends_again(of_kind(k3, "mla")) and not context.attends_again(of_kind(k3, "linear"))


def test_what_a_rank_holds(k3: SimpleNamespace) -> None:
    plans, tokens = columns(k3, 1, 32)
    latent = context.held_bytes(k3.work, of_kind(k3, "mla"), plans, FUSED, tokens)
    expanded = 2 * 2 * (S // 32) * HEADS * (NOPE + ROPE + VALUE)
    assert latent.tolist() == [0, (2 + 4) * S * (LATENT + ROPE) + expanded]
    linear = context.held_bytes(k3.work, of_kind(k3, "linear"), plans, FUSED, tokens)
    assert linear.tolist() == [0, 2 * 64 * HEADS * D * 2 * D * 4]


@pytest.fixture(scope="module")
def sparse(k3: SimpleNamespace) -> SimpleNamespace:
    """Kimi K3 with a lightning indexer in the place of full attention, 32k tokens."""
    kinds = tuple(
        kind.model_copy(update={"attention": "dsa"}) if kind.attention == "mla" else kind
        for kind in k3.model.layer_kinds
    )
    sizes = {"index_num_heads": 32, "index_head_dim": 128, "index_topk": 2048}
    shape = k3.model.shape.model_copy(update=sizes)
    model = k3.model.model_copy(update={"layer_kinds": kinds, "shape": shape})
    work = workload(model, recipe_for(batch=4, tokens=1 << 15), ())
    return SimpleNamespace(model=model, work=work, layer=of_kind(SimpleNamespace(work=work), "dsa"))


BY_KERNEL = FusedProviders({"dsa": ("shardwright", ())}, {"dsa": "dsa"})


def test_sparse_attention_expands_others_latents_where_the_familys_own_code_runs(
    k3: SimpleNamespace, sparse: SimpleNamespace
) -> None:
    """As MLA does; our operators attend in the latent. Exchanged besides: the indexer's keys, forward alone."""
    plans, tokens = columns(k3, 1, 8)
    latent = of_kind(k3, "mla")
    for of in (context.further_flops, context.held_bytes):
        own, ours, mla = (
            np.array(of(sparse.work, layer, plans, fused, tokens))
            for layer, fused in ((sparse.layer, FUSED), (sparse.layer, BY_KERNEL), (latent, FUSED))
        )
        assert np.all(ours <= own) and np.any(ours < own)
        beside = 2 * 128 * tokens * plans.cp * (1 + 4 / 2) if of is context.held_bytes else 0.0
        assert np.array_equal(own, mla + np.where(plans.cp > 1, beside, 0.0))
    flops = context.further_flops(sparse.work, sparse.layer, plans, BY_KERNEL, tokens)
    assert [one.tolist() for one in flops] == [[0.0, 0.0]] * 2


def test_masked_attention_of_cut_rows_skips_what_lies_behind_a_piece_and_runs_again(sparse: SimpleNamespace) -> None:
    """Of 2·cp pieces a rank's two meet i + 1 and 2·cp − i; scores of the indexer are of all keys, and made once."""
    S, cps = 1 << 15, (1, 2, 4)
    strategies = [ParallelStrategy(mesh=Mesh(shard=8 // cp, cp=cp), base_format="mxfp4") for cp in cps]
    plans = plans_of(strategies, sparse.model)
    tokens, rates = plans.tokens(S), Rates.of(load_cluster("h200-128"), "bfloat16", None)
    forward, backward = attention_time(sparse.work, sparse.layer, plans, rates, FUSED, tokens)
    shape = sparse.work.profile.shape
    width = shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim
    for at, cp in enumerate(cps):
        T, n = S // cp, shape.num_attention_heads
        keys = [sum(((i + 1) + (2 * cp - i)) * S // (2 * cp) * (T // 2) for i in range(cp)) / cp, T * S][cp == 1]
        core = float(rates.masked_attention_s(2.0 * keys * n * width, float(S)))
        index = float(rates.wide_gemm_s(2.0 * T * S * 32 * 128, 0.0)) + T * S * (4 * 6 * 32 + 31) / rates.bandwidth
        back = float(rates.attention_backward_s(core, T * n * width / 2))
        flops = context.further_flops(sparse.work, sparse.layer, plans, FUSED, tokens)
        further, again = (float(rates.gemm_s(one, 0.0, tokens)[at]) for one in flops)
        assert forward[at] == pytest.approx(index + core + further, rel=1e-9)
        repeated = (core + MASK_BYTES * keys / rates.bandwidth) if cp > 1 else 0.0
        assert backward[at] == pytest.approx(back + again + repeated, rel=1e-9)
    assert forward[0] / 8 < forward[2] < forward[0] / 4, "a quarter of the queries meet half of the keys and more"


def test_nothing_flows_back_through_a_kernels_indexer(sparse: SimpleNamespace) -> None:
    """A wider indexer takes longer forward alone."""
    plans = plans_of([ParallelStrategy(mesh=Mesh(shard=8), base_format="mxfp4")], sparse.model)
    tokens, rates = plans.tokens(1 << 15), Rates.of(load_cluster("h200-128"), "bfloat16", None)
    shape = sparse.model.shape.model_copy(update={"index_num_heads": 64})
    wider = workload(sparse.model.model_copy(update={"shape": shape}), sparse.work.recipe, ())
    one = attention_time(sparse.work, sparse.layer, plans, rates, BY_KERNEL, tokens)
    two = attention_time(wider, sparse.layer, plans, rates, BY_KERNEL, tokens)
    assert two[0] > 1.1 * one[0] and two[1] == pytest.approx(one[1], rel=1e-12)


def test_plain_attention_gathers_keys_and_values(build: SimpleNamespace) -> None:
    """Qwen3-30B: keys and values of 4 heads × 128; in backward again, and their gradient in fp32."""
    profile, recipe = build.qwen3_30b(), build.recipe_of(batch=8, tokens=4096)
    work = workload(profile, recipe, ())
    plans = plans_of([ParallelStrategy(mesh=Mesh(shard=4, cp=2))], profile)
    layer, tokens = work.layers[0], plans.tokens(4096)
    forward, backward = context.exchanged_bytes(work, layer, plans, tokens)
    assert forward.tolist() == [2 * 2 * 4096 * 512] and backward.tolist() == [(2 + 4) * 2 * 4096 * 512]
    assert context.held_bytes(work, layer, plans, FUSED, tokens).tolist() == [(2 + 4) * 2 * 4096 * 512]
    assert [flops.tolist() for flops in context.further_flops(work, layer, plans, FUSED, tokens)] == [[0.0], [0.0]]


def test_a_million_tokens_fit_128_devices_by_context(k3: SimpleNamespace) -> None:
    """64 ranks a sequence hold two of them in 140 GB; 32 do not, but are leaner than 32 tensor ranks, for backward
    gathers and attends again, which takes its time."""
    cluster = load_cluster("h200-128")
    two = workload(k3.model, recipe_for(batch=2, tokens=S), targets_for(k3.model, rank=16))
    assert price(two, cluster, plan(64), FUSED).feasible
    tensor = ParallelStrategy(mesh=Mesh(ep=4, tp=32), checkpointing="full", base_format="mxfp4")
    cut, split = (price(k3.work, cluster, one, FUSED) for one in (plan(32), tensor))
    assert cut.memory.reserved_bytes < split.memory.reserved_bytes and not cut.feasible
    assert split.time.step_ms < cut.time.step_ms < 1.1 * split.time.step_ms
    names = {one.name: one.milliseconds for one in cut.time.components}
    assert names["context_gathers"] > 0 and "context_ring" not in names
    assert "context_gathers" not in {one.name for one in split.time.components}


def test_half_the_tokens_a_rank_cost_half_the_attention(k3: SimpleNamespace) -> None:
    def attention(report: CostReport) -> float:
        return next(one.milliseconds for one in report.time.components if one.name == "attention")

    cluster = load_cluster("h200-128")
    near, far = (attention(price(k3.work, cluster, plan(cp), FUSED)) for cp in (16, 32))
    assert near / far == pytest.approx(2.0, rel=0.05), "the rest is what does not shrink: others' tokens expanded"
    assert near / far < 2.0


def test_layers_with_states_may_be_cut(k3: SimpleNamespace) -> None:
    """Legal, run, with chosen keys too, and refused where the sequence does not divide."""
    cluster = load_cluster("h200-128")
    assert violations(k3.model, k3.recipe, cluster, plan(32), explore=True) == ()
    assert violations(k3.model, k3.recipe, cluster, plan(32)) == ()
    kinds = tuple(
        kind.model_copy(update={"attention": "dsa"}) if kind.attention == "mla" else kind
        for kind in k3.model.layer_kinds
    )
    assert violations(k3.model.model_copy(update={"layer_kinds": kinds}), k3.recipe, cluster, plan(32)) == ()
    odd = recipe_for(batch=4, tokens=S + 2)
    rules = {one.rule for one in violations(k3.model, odd, cluster, plan(32), explore=True)}
    assert "sequence-divides" in rules


def test_degrees_on_offer_divide_the_sequence(build: SimpleNamespace) -> None:
    profile, recipe = build.tiny(4), build.recipe_of(batch=4, tokens=12)
    found = legal_strategies(profile, recipe, build.cluster_of("h200-8"), explore=True)
    assert {one.mesh.cp for one in found} == {1, 2}, "12 tokens divide into 2·2 pieces, not into 2·4 or 2·8"
