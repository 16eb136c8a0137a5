"""Sparse attention that a plan installs in families' own models, in Triton's CPU interpreter, fp32.

Forward and every adapter's gradient against transformers' own modules with the same adapters; two documents in a row.
Legend: B rows, S tokens a row, K selected keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.kernels.dsa.attention.choose import Measured, choose  # noqa: E402
from shardwright.kernels.registry import source_sha256  # noqa: E402
from shardwright.runtime import fused_dsa_layer, fused_dsa_loss  # noqa: E402
from shardwright.runtime.batch import IGNORE  # noqa: E402
from shardwright.runtime.experts.balance import LoadMeter  # noqa: E402
from shardwright.runtime.fuse import fusions_off, install_fusions  # noqa: E402
from shardwright.runtime.fused_dsa_ways import ways_taken  # noqa: E402
from shardwright.runtime.lora.linear import LoraLinear  # noqa: E402
from shardwright.runtime.losses import summed_loss  # noqa: E402
from shardwright.runtime.reference import reference_step  # noqa: E402
from shardwright.schemas.errors import KernelError, LegalityError, RecipeError  # noqa: E402
from shardwright.schemas.fusion import FusionDecision  # noqa: E402

transformers = pytest.importorskip("transformers")

B, S, K = 2, 8, 4
TOLERANCE = 1e-5
"""Of the largest value; the plan allows 0.02 in bf16."""
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": K,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
ROLES = {
    "q_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_b_weight": "kv_b_proj.weight",
    "o": "o_proj",
    "index_q": "indexer.wq_b",
    "index_k": "indexer.wk",
    "index_norm": "indexer.k_norm",
    "index_weights": "indexer.weights_proj",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"layout": "interleaved", "index_layout": "half-split", "index_first": True, "hands_on": False},
    "glm_moe_dsa": {"layout": "interleaved", "index_layout": "interleaved", "index_first": True, "hands_on": True},
    "hy_v4": {"layout": "half-split", "index_layout": "half-split", "index_first": False, "hands_on": True},
}
LAYERS = {"deepseek_v32": ("full",), "glm_moe_dsa": ("full", "shared"), "hy_v4": ("full", "shared")}


def build(family: str) -> Any:
    """A tiny model whose scores do not tie: sixteen indexer heads, of which some is above 0 for every pair."""
    types = LAYERS[family]
    more = {} if family == "deepseek_v32" else {"indexer_types": list(types)}
    config = transformers.AutoConfig.for_model(family, **SIZES, num_hidden_layers=len(types), **more)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for name, module in list(model.named_modules()):
        if name.endswith("self_attn"):
            for child in ("q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "o_proj"):
                setattr(module, child, adapted(getattr(module, child)))
    return model


def adapted(linear: nn.Linear) -> LoraLinear:
    made = LoraLinear(linear, 4, 0.5, 0.0, torch.float32)
    nn.init.normal_(made.lora_a, std=0.2)
    nn.init.normal_(made.lora_b, std=0.2)
    return made


def decision(model: Any, family: str, layer: int, **changes: Any) -> FusionDecision:
    config, module = model.config, model.model.layers[layer].self_attn
    form = "own" if LAYERS[family][layer] == "full" else "shared"
    more = {"gate": "gate_proj", "sinks": "sinks"} if family == "hy_v4" else {}
    roles = {role: name for role, name in ROLES.items() if form == "own" or not role.startswith("index")}
    constants = {
        **FAMILIES[family],
        "nope": config.qk_nope_head_dim,
        "rope": config.qk_rope_head_dim,
        "value": config.v_head_dim,
        "scale": str(module.scaling),
        "top_k": config.index_topk,
        "form": form,
        "index_scale": str((config.index_n_heads * config.index_head_dim) ** -0.5),
    }
    return FusionDecision(
        proposal_id=f"dsa.{layer}",
        pattern="dsa",
        variant="kernel",
        provider="shardwright",
        op="dsa",
        modules=(f"model.layers.{layer}.self_attn",),
        roles={**roles, **more},
        constants={**constants, **changes},
        source_sha256=source_sha256("dsa"),
        reason="as planned",
        tolerance="0.02",
    )


def run(model: Any, positions: Tensor | None) -> list[Tensor]:
    """Logits, and the gradient of every adapter."""
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ids = torch.arange(B * S).view(B, S) % 50 + 3
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
    return [logits.detach(), *torch.autograd.grad((logits * weights).sum(), adapters)]


def two_documents() -> Tensor:
    return torch.stack([torch.arange(S), torch.cat([torch.arange(3), torch.arange(S - 3)])])


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_installed_equals_the_family(family: str) -> None:
    """All layers; and one alone beside the family's own, which takes over the choice or hands it on."""
    model = build(family)
    positions = two_documents()
    expected = run(model, positions)
    assert all(float(part.abs().max()) > 0 for part in expected), "an adapter without a gradient proves nothing"
    switches = install_fusions(model, tuple(decision(model, family, at) for at in range(len(LAYERS[family]))))
    assert distance(run(model, positions), expected) < TOLERANCE
    (way,) = ways_taken(model)
    assert (way.path, way.row_tokens, len(way.modules)) == ("sparse", S, len(LAYERS[family]))
    assert "sinks" in way.reason if family == "hy_v4" else f"longer than the {K} selected" in way.reason
    assert way.planned == "as planned"
    with fusions_off(switches):
        assert distance(run(model, positions), expected) == 0
    if family == "glm_moe_dsa":
        for first in (True, False):
            switches[0].fused, switches[1].fused = first, not first
            assert distance(run(model, positions), expected) < TOLERANCE


def test_a_row_no_longer_than_the_choice_runs_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """No indexer, no sparse kernel; and what is handed on selects every key."""
    model = build("glm_moe_dsa")
    model.config.index_topk = 64
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 64
    expected = run(model, two_documents())
    switches = install_fusions(model, tuple(decision(model, "glm_moe_dsa", at) for at in range(2)))

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("an operator ran")

    monkeypatch.setattr("shardwright.kernels.dsa.op.latent_attention", never)
    monkeypatch.setattr("shardwright.kernels.dsa.indexer.op.dsa_indexer", never)
    assert distance(run(model, two_documents()), expected) < TOLERANCE
    switches[1].fused = False
    assert distance(run(model, two_documents()), expected) < TOLERANCE
    layer = fused_dsa_layer.SparseAttention.of(model.model.layers[0].self_attn, "x", decision(model, "glm_moe_dsa", 0))
    assert [(way.path, way.row_tokens) for way in ways_taken(model)] == [("dense", S)]
    assert layer.choice(S).path == "dense" and "same function" in layer.choice(S).reason
    assert layer.choice(65).path == "sparse"


def test_the_indexer_of_a_fused_layer_keeps_no_graph() -> None:
    """Frozen by default: a gradient to the indexer's parameters would be the language loss's."""
    model = build("deepseek_v32")
    install_fusions(model, (decision(model, "deepseek_v32", 0),))
    indexer = model.model.layers[0].self_attn.indexer
    indexer.requires_grad_(True)
    logits = model(input_ids=torch.arange(S)[None] + 3, use_cache=False).logits
    found = torch.autograd.grad(logits.sum(), list(indexer.parameters()), allow_unused=True)
    assert all(part is None for part in found)


def test_a_mask_that_is_no_documents_mask_is_refused() -> None:
    model = build("deepseek_v32")
    install_fusions(model, (decision(model, "deepseek_v32", 0),))
    padded = torch.ones(B, S, dtype=torch.long)
    padded[0, :3] = 0
    with pytest.raises(LegalityError, match="differs from causal documents") as caught:
        model(input_ids=torch.arange(B * S).view(B, S) % 50 + 3, attention_mask=padded, use_cache=False)
    assert caught.value.code == "legality/fusion-dsa"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.model_copy(update={"roles": {**d.roles, "q_a": "q_lora"}}), "q_lora"),
        (lambda d: d.model_copy(update={"roles": {k: v for k, v in d.roles.items() if k != "index_k"}}), "index_k"),
        (lambda d: d.model_copy(update={"constants": {k: v for k, v in d.constants.items() if k != "nope"}}), "nope"),
    ],
)
def test_a_plan_that_does_not_fit_the_module_is_refused(
    change: Callable[[FusionDecision], FusionDecision], said: str
) -> None:
    model = build("deepseek_v32")
    made = change(decision(model, "deepseek_v32", 0))
    with pytest.raises(LegalityError, match=said) as caught:
        install_fusions(model, (made,))
    assert caught.value.code == "legality/fusion-dsa"


def test_a_shared_layer_without_a_choice_is_refused() -> None:
    model = build("glm_moe_dsa")
    install_fusions(model, (decision(model, "glm_moe_dsa", 1),))
    layer = model.model.layers[1].self_attn
    x = torch.zeros(1, S, SIZES["hidden_size"])
    table = torch.zeros(1, S, SIZES["qk_rope_head_dim"])
    with pytest.raises(LegalityError, match="was handed none"):
        layer(x, position_embeddings=(table, table))


def test_a_choice_that_is_handed_in_is_looked_at_once() -> None:
    """Keys that a query may not see are nothing, as in the family's mask; one that stands twice is refused."""
    model = build("glm_moe_dsa")
    install_fusions(model, (decision(model, "glm_moe_dsa", 1),))
    layer = model.model.layers[1].self_attn
    x, table = torch.randn(1, S, SIZES["hidden_size"]), torch.ones(1, S, SIZES["qk_rope_head_dim"])

    def run_with(chosen: list[int]) -> Tensor:
        handed = torch.tensor(chosen, dtype=torch.int32).expand(1, S, -1)
        return layer(x, position_embeddings=(table, table), prev_topk_indices=handed)[0].detach()

    with pytest.raises(KernelError) as caught:
        run_with([0, 1, 2, 1])
    assert caught.value.code == "kernel/index-duplicated"
    layer.__dict__.pop(fused_dsa_layer.LOOKED_AT)
    assert torch.equal(run_with([0, 1, S - 1, -1])[:, :4], run_with([0, 1, -1, -1])[:, :4])


def learning_model(family: str) -> Any:
    """Adapters on the first layer's indexer too."""
    model = build(family)
    indexer = model.model.layers[0].self_attn.indexer
    for child in ("wq_b", "wk", "weights_proj"):
        setattr(indexer, child, adapted(getattr(indexer, child)))
    return model


def loss_of(model: Any, coefficient: float, share: float) -> fused_dsa_loss.IndexerLoss:
    layers = tuple(layer for layer in fused_dsa_loss.fused_layers(model) if not layer.shared)
    return fused_dsa_loss.IndexerLoss(coefficient, share, LoadMeter(), layers)


def named_gradients(model: Any, positions: Tensor | None) -> dict[str, Tensor]:
    """Of the logits' sum and whatever is attached to it; only what gets one."""
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    logits = model(input_ids=torch.arange(B * S).view(B, S) % 50 + 3, position_ids=positions, use_cache=False).logits
    weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
    found = torch.autograd.grad((logits * weights).sum(), list(learning.values()), allow_unused=True)
    return {name: part for name, part in zip(learning, found, strict=True) if part is not None}


@pytest.mark.parametrize("family", ["deepseek_v32", "hy_v4"])
def test_an_indexer_learns_by_its_own_loss_and_nothing_else_does(family: str) -> None:
    """Its adapters' gradients are those of plain torch on the family's own module; all others stay as they were."""
    model, plain = learning_model(family), learning_model(family)
    switches = install_fusions(model, (decision(model, family, 0),))
    before = named_gradients(model, two_documents())
    assert not any(".indexer." in name for name in before)
    loss = loss_of(model, 0.5, 0.25)
    loss.put_on()
    with loss.meter.record():
        after = named_gradients(model, two_documents())
    learned = {name for name in after if ".indexer." in name}
    assert len(learned) == 6 and {*after} - learned == {*before}
    assert all(torch.equal(after[name], before[name]) for name in before)
    loss.put_on_plain(plain)
    expected = named_gradients(plain, two_documents())
    assert distance([after[n] for n in sorted(learned)], [expected[n] for n in sorted(learned)]) < 1e-4
    once = loss.take()
    assert once is not None and float(once) > 0 and loss.take() is None
    switches[0].fused = False
    assert not any(".indexer." in name for name in named_gradients(model, two_documents()))


def test_documents_of_unequal_length_weigh_by_their_tokens_in_the_reference() -> None:
    """The reference runs documents one by one; the gradient of the indexers' loss is that of the rows as trained.

    One row holds five tokens, two and padding, the other eight of which none has a label: every token counts alike.
    """
    family = "deepseek_v32"
    model, plain = learning_model(family), learning_model(family)
    install_fusions(model, (decision(model, family, 0),))
    ids = torch.arange(B * S).view(B, S) % 50 + 3
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0], list(range(S))])
    labels = torch.full((B, S), IGNORE)
    labels[0, :4], labels[0, 5] = ids[0, 1:5], ids[0, 6]
    rows = torch.stack((ids, labels, positions), 1)
    loss = loss_of(model, 3.0, 1.0)
    loss.put_on()
    (summed_loss(model, rows) / 5).backward()
    ours = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    leaves = {name: one for name, one in plain.named_parameters() if one.requires_grad}
    attached = loss.put_on_plain(plain)
    step = reference_step(plain, leaves, rows, torch.device("cpu"), attached=attached)
    learned = sorted(name for name in ours if ".indexer." in name)
    assert len(learned) == 6
    assert distance([ours[name] for name in learned], [leaves[name].grad for name in learned]) < 1e-4
    assert step.grad_norm == pytest.approx(float(torch.stack([one.norm() for one in ours.values()]).norm()), rel=1e-4)


def test_a_layer_that_learns_runs_sparse_even_where_it_selects_all() -> None:
    model = learning_model("deepseek_v32")
    model.config.index_topk = 64
    install_fusions(model, (decision(model, "deepseek_v32", 0),))
    (layer,) = fused_dsa_loss.fused_layers(model)
    assert layer.choice(S).path == "dense"
    loss = loss_of(model, 1.0, 1.0)
    loss.put_on()
    assert layer.choice(S).path == "sparse" and "learns" in layer.choice(S).reason and layer.learns
    with loss.silent():
        assert layer.choice(S).path == "dense" and not layer.learns
    assert layer.learns


def plan_with(coefficient: str, **more: str) -> Any:
    from types import SimpleNamespace

    from shardwright.schemas.recipe import DataSpec, IndexerSpec, Recipe

    recipe = Recipe(data=DataSpec(train="a", held_out="b"), indexer=IndexerSpec(loss=coefficient, **more))
    return SimpleNamespace(decision=SimpleNamespace(recipe=recipe, strategy=SimpleNamespace(micro_batch_sequences=2)))


def installed(model: Any, family: str) -> Any:
    return install_fusions(model, tuple(decision(model, family, at) for at in range(len(LAYERS[family]))))


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_a_dense_warm_up_attends_to_all_and_learns_over_all(family: str) -> None:
    """Logits and every gradient are the family's with a choice of all keys, the indexer's those of plain torch."""
    model, plain, whole = learning_model(family), learning_model(family), learning_model(family)
    installed(model, family)
    loss = fused_dsa_loss.indexer_loss_for(plan_with("0.5", stage="dense"), model, LoadMeter())
    assert loss is not None
    with loss.meter.record():
        after = named_gradients(model, two_documents())
    assert {(way.path, "warm-up" in way.reason) for way in ways_taken(model)} == {("dense", True)}
    loss.put_on_plain(plain)
    expected = named_gradients(plain, two_documents())
    learned = sorted(name for name in after if ".indexer." in name)
    assert len(learned) == 6 and distance([after[n] for n in learned], [expected[n] for n in learned]) < 1e-4
    whole.model.layers[0].self_attn.indexer.index_topk = S
    everything = named_gradients(whole, two_documents())
    assert {*everything} == {*after} - {*learned}
    for found in (after, expected):
        assert distance([found[n] for n in everything], list(everything.values())) < TOLERANCE
    value = loss.take()
    assert value is not None and float(value) > 0


def test_the_warm_up_lowers_its_loss() -> None:
    model = learning_model("deepseek_v32")
    installed(model, "deepseek_v32")
    loss = fused_dsa_loss.indexer_loss_for(plan_with("1", stage="dense"), model, LoadMeter())
    assert loss is not None
    learning = {n: p for n, p in model.named_parameters() if ".indexer." in n and p.requires_grad}
    seen = []
    for _ in range(4):
        with loss.meter.record():
            found = named_gradients(model, two_documents())
        seen.append(float(loss.take() or 0))
        with torch.no_grad():
            for name, parameter in learning.items():
                parameter -= 8.0 * found[name]
    assert seen == sorted(seen, reverse=True) and seen[-1] < 0.9 * seen[0], seen


def test_sinks_have_no_dense_warm_up() -> None:
    model = learning_model("hy_v4")
    installed(model, "hy_v4")
    with pytest.raises(LegalityError, match="2 layers attend with sinks") as caught:
        fused_dsa_loss.indexer_loss_for(plan_with("0.5", stage="dense"), model, LoadMeter())
    assert caught.value.code == "legality/indexer-stage-dense"


@pytest.mark.parametrize("family", ["deepseek_v32", "hy_v4"])
def test_scores_in_fp8_choose_as_rounded_values_do(family: str) -> None:
    """The operator's choice, and the plain model's that follows it: the same, and not that of exact scores.

    Keys are nearly alike but for what is rotated, so that rounding to e4m3 changes the choice.
    """
    model, plain = build(family), build(family)
    for one in (model, plain):
        norm = one.model.layers[0].self_attn.indexer.k_norm
        nn.init.constant_(norm.weight, 0.01)
        nn.init.zeros_(norm.bias)
        nn.init.ones_(norm.bias[16:] if FAMILIES[family]["index_first"] else norm.bias[:16])
    exact = run(model, two_documents())
    installed(model, family)
    settings = fused_dsa_loss.indexer_loss_for(plan_with("0", scores="fp8"), model, LoadMeter())
    assert settings is not None and settings.layers == () and settings.take() is None
    settings.put_on_plain(plain)
    found = run(model, two_documents())
    assert distance(found, run(plain, two_documents())) < TOLERANCE
    assert distance(found, exact) > 100 * TOLERANCE, "rounding changes no choice here"


@pytest.mark.parametrize("dense_ms", [1.0, 3.0])
def test_the_faster_way_is_taken_where_the_recipe_allows_it(dense_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the times of this device, told with them; the plain model follows. Without times the selection stays."""
    model, plain, whole = (build("glm_moe_dsa") for _ in range(3))
    installed(model, "glm_moe_dsa")
    settings = fused_dsa_loss.indexer_loss_for(plan_with("0", attention="faster"), model, LoadMeter())
    assert settings is not None
    layer = fused_dsa_loss.fused_layers(model)[0]
    assert layer.choice(S).path == "sparse" and "no times were measured on cpu" in layer.choice(S).reason
    measured = {"cpu": Measured({S: (dense_ms, dense_ms)}, {S: (1.5, 1.5)}, {S: 1.0})}
    monkeypatch.setattr(fused_dsa_layer, "choose", partial(choose, measured=measured))
    settings.put_on_plain(plain)
    found = run(model, two_documents())
    (way,) = ways_taken(model)
    assert way.path == ("dense" if dense_ms < 2 else "sparse") and f"{2 * dense_ms:.1f} ms dense and 4.0" in way.reason
    assert distance(found, run(plain, two_documents())) < TOLERANCE
    whole.model.layers[0].self_attn.indexer.index_topk = S
    assert (distance(found, run(whole, two_documents())) < TOLERANCE) == (dense_ms < 2)


def test_settings_without_an_indexer_are_refused() -> None:
    plain = nn.Linear(2, 2)
    with pytest.raises(RecipeError) as caught:
        fused_dsa_loss.indexer_loss_for(plan_with("0", scores="fp8"), plain, LoadMeter())
    assert caught.value.code == "recipe/indexer-none"


def test_a_recipe_asks_for_the_loss_or_not() -> None:
    model = learning_model("deepseek_v32")
    assert fused_dsa_loss.indexer_loss_for(plan_with("0"), model, LoadMeter()) is None
    with pytest.raises(LegalityError) as unfused:
        fused_dsa_loss.indexer_loss_for(plan_with("0.1"), model, LoadMeter())
    assert unfused.value.code == "legality/indexer-loss-unfused"
    install_fusions(model, (decision(model, "deepseek_v32", 0),))
    made = fused_dsa_loss.indexer_loss_for(plan_with("0.1"), model, LoadMeter())
    assert made is not None and (made.coefficient, made.share) == (0.1, 0.25)
    frozen = build("deepseek_v32")
    install_fusions(frozen, (decision(frozen, "deepseek_v32", 0),))
    with pytest.raises(RecipeError) as nothing:
        fused_dsa_loss.indexer_loss_for(plan_with("0.1"), frozen, LoadMeter())
    assert nothing.value.code == "recipe/indexer-loss-frozen"


def trained(model: Any, ids: Tensor, steps: int = 2) -> list[float]:
    """Losses of AdamW steps on every adapter; each backward is the indexers' too, where their loss is on."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(learning, lr=0.02), []
    for _ in range(steps):
        loss = model(input_ids=ids, position_ids=two_documents(), labels=ids, use_cache=False).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_trains_as_the_family_does(family: str) -> None:
    """Two steps with the own loss of its indexers: the plain family's losses, falling, and its adapters."""
    model, plain = learning_model(family), learning_model(family)
    switches = installed(model, family)
    before = {name: part.detach().clone() for name, part in model.named_parameters() if part.requires_grad}
    loss = fused_dsa_loss.indexer_loss_for(plan_with("4"), model, LoadMeter())
    assert loss is not None
    loss.put_on_plain(plain)
    fused = named_gradients(model, two_documents())
    with fusions_off(switches):
        unfused = named_gradients(model, two_documents())
    assert {*fused} == {*unfused} == {*before}
    assert distance([fused[name] for name in before], [unfused[name] for name in before]) < 1e-4
    ids = torch.arange(B * S).view(B, S) * 7 % 50 + 3
    found, expected = trained(model, ids), trained(plain, ids)
    assert found == pytest.approx(expected, rel=1e-4) and found[-1] < found[0]
    after, others = dict(model.named_parameters()), dict(plain.named_parameters())
    assert all(not torch.equal(after[name], part) for name, part in before.items()), "every adapter moved"
    assert distance([after[n].detach() for n in before], [others[n].detach() for n in before]) < 1e-2
