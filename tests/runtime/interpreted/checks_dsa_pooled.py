"""glm5_next's sparse attention over pools of keys that a plan installs, in Triton's CPU interpreter, fp32.

Against transformers' own modules with the same adapters. The family knows no documents: a packed row is compared with
each of its documents run alone.
Legend: B rows, S tokens a row, P tokens of a pool, K tokens of the chosen pools.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.kernels.registry import source_sha256  # noqa: E402
from shardwright.runtime import fused_dsa_loss  # noqa: E402
from shardwright.runtime.experts.balance import LoadMeter  # noqa: E402
from shardwright.runtime.fuse import fusions_off, install_fusions  # noqa: E402
from shardwright.runtime.fused_dsa_pooled import PooledSparseAttention, Pools  # noqa: E402
from shardwright.runtime.lora.linear import LoraLinear  # noqa: E402
from shardwright.schemas.errors import LegalityError  # noqa: E402
from shardwright.schemas.fusion import FusionDecision  # noqa: E402
from shardwright.schemas.recipe import DataSpec, IndexerSpec, Recipe  # noqa: E402

modelling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")

B, S, P, K = 2, 12, 2, 4
DOCUMENTS = ((12,), (3, 9))
"""Tokens of each document by row."""
TOLERANCE = 1e-5
LAYERS = ("full", "full", "shared")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 0,
    "v_head_dim": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": K,
    "index_kpool": P,
    "num_hidden_layers": len(LAYERS),
    "layer_types": ["indexed_attention"] * len(LAYERS),
    "indexer_types": list(LAYERS),
    "mlp_layer_types": ["dense"] * len(LAYERS),
    "hc_mult": 2,
    "intermediate_size": 48,
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
    "pool_position": "indexer.index_kpool_compress_ape",
    "pool_gate": "indexer.index_kpool_compress_gate",
}


def build(**changes: Any) -> Any:
    """A tiny text model whose scores do not tie, adapters on every projection of its attentions."""
    config = modelling.Glm5NextTextConfig(**{**SIZES, **changes})
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = modelling.Glm5NextTextModel(config)
    model.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    for layer in model.layers:
        for child in ("q_a_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "o_proj"):
            setattr(layer.self_attn, child, adapted(getattr(layer.self_attn, child)))
    return model


def adapted(linear: nn.Linear) -> LoraLinear:
    made = LoraLinear(linear, 4, 0.5, 0.0, torch.float32)
    nn.init.normal_(made.lora_a, std=0.2)
    nn.init.normal_(made.lora_b, std=0.2)
    return made


def decision(model: Any, layer: int, **changes: Any) -> FusionDecision:
    config, module = model.config, model.layers[layer].self_attn
    own = LAYERS[layer] == "full"
    constants = {
        "nope": config.qk_nope_head_dim,
        "rope": 0,
        "value": config.v_head_dim,
        "scale": str(module.scaling),
        "layout": "none",
        "top_k": config.index_topk,
        "pool": config.index_kpool,
        "form": "own" if own else "shared",
        "hands_on": bool(module.next_skip_topk),
        "index_layout": "none",
        "index_first": True,
        "index_scale": str((config.index_n_heads * config.index_head_dim) ** -0.5),
    }
    return FusionDecision(
        proposal_id=f"dsa_pooled.{layer}",
        pattern="dsa_pooled",
        variant="kernel",
        provider="shardwright",
        op="dsa",
        modules=(f"layers.{layer}.self_attn",),
        roles={role: name for role, name in ROLES.items() if own or not name.startswith("indexer.")},
        constants={**constants, **changes},
        source_sha256=source_sha256("dsa"),
        tolerance="0.02",
    )


def install(model: Any) -> Any:
    return install_fusions(model, tuple(decision(model, at) for at in range(len(LAYERS))))


IDS = torch.arange(B * S).view(B, S) * 7 % 59 + 3


def graded(model: Any, states: Tensor) -> list[Tensor]:
    """The last hidden states, and the gradient of every adapter."""
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = torch.linspace(-1, 1, states.numel()).view(states.shape)
    return [states.detach(), *torch.autograd.grad((states * weights).sum(), adapters)]


def packed(model: Any, positions: Tensor | None = None) -> list[Tensor]:
    return graded(model, model(input_ids=IDS, position_ids=positions, use_cache=False).last_hidden_state)


def alone(model: Any) -> list[Tensor]:
    """Each document as the only row of its own call."""
    rows = []
    for row, lengths in zip(IDS, DOCUMENTS, strict=True):
        parts = [model(input_ids=part[None], use_cache=False).last_hidden_state for part in row.split(lengths)]
        rows.append(torch.cat(parts, 1))
    return graded(model, torch.cat(rows))


def positions() -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in DOCUMENTS])


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def test_installed_equals_the_family() -> None:
    """All layers; and one alone beside the family's own, which hands its choice on or takes one over."""
    model = build()
    expected = packed(model)
    assert all(float(part.abs().max()) > 0 for part in expected), "an adapter without a gradient proves nothing"
    switches = install(model)
    assert all(isinstance(s.fused_forward.layer, PooledSparseAttention) for s in switches)
    assert distance(packed(model), expected) < TOLERANCE
    with fusions_off(switches):
        assert distance(packed(model), expected) == 0
    for only in (1, 2):
        for at, switch in enumerate(switches):
            switch.fused = at == only
        assert distance(packed(model), expected) < TOLERANCE


def test_documents_of_a_row_are_apart() -> None:
    """Pools are counted from each document's first token; nine tokens end in a begun pool."""
    model = build()
    expected = alone(model)
    assert distance(packed(model), expected) > 100 * TOLERANCE, "documents change nothing here"
    install(model)
    assert distance(packed(model, positions()), expected) < TOLERANCE


def test_rows_that_select_all_run_dense_and_hand_on_what_each_query_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve tokens are all selected by pools of twelve tokens; of eleven tokens and one begun pool too."""
    model = build(index_topk=12)
    expected = packed(model)
    switches = install(model)
    layer = switches[0].fused_forward.layer
    assert layer.choice(S).path == "dense" and layer.choice(13).path == "dense" and layer.choice(14).path == "sparse"

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("an operator ran")

    monkeypatch.setattr("shardwright.kernels.dsa.op.latent_attention", never)
    monkeypatch.setattr("shardwright.kernels.dsa.indexer.op.dsa_indexer", never)
    assert distance(packed(model), expected) < TOLERANCE
    switches[2].fused = False
    assert distance(packed(model), expected) < TOLERANCE


class Wrapped(nn.Module):
    """The family's attention, called with tensors alone."""

    def __init__(self, at: int) -> None:
        super().__init__()
        config = modelling.Glm5NextTextConfig(**SIZES)
        config._attn_implementation = "sdpa"
        self.inner = modelling.Glm5NextTextAttention(config, at)

    def forward(self, x: Tensor, valid: Tensor, *handed: Tensor) -> Any:
        more = {"prev_topk_indices": handed[0]} if handed else {}
        return tuple(part for part in self.inner(x, valid, **more) if part is not None)


def test_what_the_structure_agent_decides_installs(decided: Any) -> None:
    """Roles and constants as the pattern binds them, not as they are written here."""
    from shardwright.agents.structure.patterns.dsa_pooled import PooledSparseAttention as Found

    model = build()
    for at in range(len(LAYERS)):
        shapes = [((2, 12, 32), torch.bfloat16), ((2, 12), torch.bool), ((2, 12, K + P - 1), torch.int32)]
        made = decided(Found(), lambda at=at: Wrapped(at), shapes[: 3 if at == 2 else 2], f"layers.{at}.self_attn")
        wanted = decision(model, at)
        skipped = () if LAYERS[at] == "full" else ("index_layout", "index_first", "index_scale")
        constants = {name: value for name, value in wanted.constants.items() if name not in skipped}
        assert {name: made.constants[name] for name in constants} == constants
        assert made.roles == wanted.roles
        install_fusions(model, (made,))


def test_pools_of_documents() -> None:
    """Against counting by hand: documents of 5, 1 and 4 tokens, pools of two."""
    first = torch.tensor([0, 0, 0, 0, 0, 5, 6, 6, 6, 6])
    pools = Pools(2, first, torch.arange(10))
    assert pools.ends().tolist() == [1, 3, 7, 9, 10]
    assert pools.whole.tolist() == [0, 1, 1, 2, 2, 0, 0, 1, 1, 2]
    assert [int(n) for n, seen in zip(pools.number(), pools.whole, strict=True) if seen] == [0, 0, 1, 1, 2, 2, 3]
    assert pools.begun()[:, 0].tolist() == [0, -1, 2, -1, 4, 5, 6, -1, 8, -1]
    order, starts = pools.grouped()
    assert order.tolist() == [0, 1, 3, 2, 4, 5, 6, 7, 9, 8]
    assert starts.tolist() == [0, 1, 3, 5, 6, 7, 9, 10, 10, 10, 10]


def test_padding_is_refused() -> None:
    model = build()
    install(model)
    valid = torch.ones(B, S, dtype=torch.long)
    valid[0, :3] = 0
    with pytest.raises(LegalityError, match="3 of 24 tokens are padding") as caught:
        model(input_ids=IDS, attention_mask=valid, use_cache=False)
    assert caught.value.code == "legality/fusion-dsa"


def test_a_plan_without_the_pools_parts_is_refused() -> None:
    model = build()
    made = decision(model, 0)
    roles = {role: name for role, name in made.roles.items() if role != "pool_gate"}
    with pytest.raises(LegalityError, match="pool_gate"):
        install_fusions(model, (made.model_copy(update={"roles": roles}),))


def learning_model() -> Any:
    """Adapters on the indexers too."""
    model = build()
    for layer in model.layers:
        for child in ("wq_b", "wk", "weights_proj") if layer.self_attn.indexer is not None else ():
            setattr(layer.self_attn.indexer, child, adapted(getattr(layer.self_attn.indexer, child)))
    return model


def plan_with(**indexer: str) -> Any:
    recipe = Recipe(data=DataSpec(train="a", held_out="b"), indexer=IndexerSpec(**indexer))
    strategy = SimpleNamespace(micro_batch_sequences=2)
    return SimpleNamespace(decision=SimpleNamespace(recipe=recipe, strategy=strategy))


def named_gradients(model: Any, positions: Tensor | None = None) -> dict[str, Tensor]:
    """Of the states' sum and whatever is attached to it; only what gets one."""
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    states = model(input_ids=IDS, position_ids=positions, use_cache=False).last_hidden_state
    weights = torch.linspace(-1, 1, states.numel()).view(states.shape)
    found = torch.autograd.grad((states * weights).sum(), list(learning.values()), allow_unused=True)
    return {name: part for name, part in zip(learning, found, strict=True) if part is not None}


def test_an_indexer_of_pools_learns_by_its_own_loss_and_nothing_else_does() -> None:
    """Its adapters' gradients are those of plain torch on the family's own module; all others stay as they were."""
    model, plain = learning_model(), learning_model()
    install(model)
    before = named_gradients(model)
    assert not any(".indexer." in name for name in before)
    loss = fused_dsa_loss.indexer_loss_for(plan_with(loss="0.5"), model, LoadMeter())
    assert loss is not None and len(loss.layers) == 2
    with loss.meter.record():
        after = named_gradients(model)
    learned = sorted(name for name in after if ".indexer." in name)
    assert len(learned) == 12 and {*after} - {*learned} == {*before}
    assert all(torch.equal(after[name], before[name]) for name in before)
    loss.put_on_plain(plain)
    expected = named_gradients(plain)
    assert distance([after[n] for n in learned], [expected[n] for n in learned]) < 1e-4
    once = loss.take()
    assert once is not None and float(once) > 0 and loss.take() is None


def by_hand(attention: Any, x: Tensor) -> Tensor:
    """The loss of one row ``[S, hidden]``, query by query, pool by pool."""
    heads, N, J, indexer = SIZES["num_attention_heads"], SIZES["qk_nope_head_dim"], 16, attention.indexer
    q_latent = attention.q_a_layernorm(attention.q_a_proj(x))
    q = attention.q_b_proj(q_latent).view(S, heads, N)
    keys = attention.kv_b_proj(attention.kv_a_layernorm(attention.kv_a_proj_with_mqa(x))).view(S, heads, -1)[..., :N]
    q, keys = q.detach(), keys.detach()
    index_q, index_k = indexer.wq_b(q_latent.detach()).view(S, J, -1), indexer.k_norm(indexer.wk(x))
    gates, weights = x @ indexer.index_kpool_compress_gate.T, indexer.weights_proj(x)
    pools = []
    for first in range(0, S - P + 1, P):
        shares = (gates[first : first + P] + indexer.index_kpool_compress_ape).softmax(0)
        pools.append((shares * index_k[first : first + P]).sum(0))
    total = torch.zeros((), dtype=x.dtype)
    for t in range(S):
        whole = (t + 1) // P
        scores = [(weights[t] * (index_q[t] @ pools[n]).relu()).sum() * (J * 32) ** -0.5 for n in range(whole)]
        chosen = sorted(range(whole), key=lambda n: -float(scores[n]))[: K // P]
        if not chosen:
            continue
        tokens = [n * P + i for n in chosen for i in range(P)]
        seen = [*tokens, *range(whole * P, t + 1)]
        shares = (torch.einsum("hn,khn->hk", q[t], keys[seen]) * attention.scaling).softmax(-1)
        target = shares[:, : len(tokens)].sum(0).view(-1, P).sum(-1)
        target = target / target.sum()
        logs = torch.stack([scores[n] for n in chosen]).log_softmax(0)
        total = total + (target * (target.log() - logs)).sum()
    return total


def test_the_loss_of_pools_is_that_of_counting_by_hand() -> None:
    """In fp64, with the gradient of one adapter, for the states that the first layer sees."""
    model = learning_model()
    attention = model.layers[0].self_attn
    states: list[Tensor] = []
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: states.append(kwargs.get("hidden_states", args[0] if args else None)), with_kwargs=True
    )
    install_fusions(model, (decision(model, 0),))
    loss = fused_dsa_loss.IndexerLoss(1.0, 1.0, LoadMeter(), fused_dsa_loss.fused_layers(model))
    loss.put_on()
    with loss.meter.record():
        found = named_gradients(model)["layers.0.self_attn.indexer.wk.lora_a"]
    value, x = loss.take(), states[0].detach().double()
    plain = learning_model().double().layers[0].self_attn
    exact = sum((by_hand(plain, row) for row in x), torch.zeros((), dtype=torch.float64)) / (B * S)
    (gradient,) = torch.autograd.grad(exact, plain.indexer.wk.lora_a)
    assert value is not None and abs(float(value) / float(exact) - 1) < 1e-4
    assert distance([found.double()], [gradient]) < 1e-3


def test_the_loss_of_packed_documents_is_that_of_each_alone() -> None:
    model = learning_model()
    install(model)
    loss = fused_dsa_loss.IndexerLoss(1.0, 1.0, LoadMeter(), fused_dsa_loss.fused_layers(model)[:2])
    loss.put_on()
    with loss.meter.record():
        model(input_ids=IDS, position_ids=positions(), use_cache=False)
        packed_loss, total = loss.take(), 0.0
        for row, lengths in zip(IDS, DOCUMENTS, strict=True):
            for part in row.split(lengths):
                model(input_ids=part[None], use_cache=False)
                alone_loss = loss.take()
                assert alone_loss is not None
                total += float(alone_loss) * len(part) / (B * S)
        assert packed_loss is not None and total == pytest.approx(float(packed_loss), rel=1e-4)
        model(input_ids=IDS[:, :1], use_cache=False)
        assert float(loss.take() or 0) == 0, "one token makes no pool"


def test_pools_have_no_dense_warm_up() -> None:
    model = learning_model()
    install(model)
    with pytest.raises(LegalityError, match="3 layers score pools") as caught:
        fused_dsa_loss.indexer_loss_for(plan_with(loss="0.5", stage="dense"), model, LoadMeter())
    assert caught.value.code == "legality/indexer-stage-dense"


def test_pools_scored_in_fp8_are_those_of_rounded_values() -> None:
    """The operator's choice, and the plain model's that follows it: the same, and not that of exact scores."""
    model, plain = build(), build()
    exact = packed(model)
    install(model)
    settings = fused_dsa_loss.indexer_loss_for(plan_with(scores="fp8"), model, LoadMeter())
    assert settings is not None and settings.layers == () and settings.take() is None
    settings.put_on_plain(plain)
    found = packed(model)
    assert distance(found, packed(plain)) < TOLERANCE
    assert distance(found, exact) > 100 * TOLERANCE, "rounding changes no choice here"


def trained(model: Any, steps: int = 2) -> list[float]:
    """Losses of AdamW steps on every adapter; each backward is the indexers' too."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(learning, lr=0.02), []
    target = torch.linspace(-1, 1, B * S * SIZES["hidden_size"]).view(B, S, -1)
    for _ in range(steps):
        loss = (model(input_ids=IDS, use_cache=False).last_hidden_state - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_a_tiny_model_trains_as_the_family_does() -> None:
    """Two steps with the own loss of its indexers: the plain family's losses, falling, and its adapters."""
    model, plain = learning_model(), learning_model()
    switches = install(model)
    before = {name: part.detach().clone() for name, part in model.named_parameters() if part.requires_grad}
    loss = fused_dsa_loss.indexer_loss_for(plan_with(loss="4"), model, LoadMeter())
    assert loss is not None
    loss.put_on_plain(plain)
    fused = named_gradients(model)
    with fusions_off(switches):
        unfused = named_gradients(model)
    assert {*fused} == {*unfused} == {*before}
    assert distance([fused[name] for name in before], [unfused[name] for name in before]) < 1e-4
    found, expected = trained(model), trained(plain)
    assert found == pytest.approx(expected, rel=1e-4) and found[-1] < found[0]
    after, others = dict(model.named_parameters()), dict(plain.named_parameters())
    assert all(not torch.equal(after[name], part) for name, part in before.items()), "every adapter moved"
    assert distance([after[n].detach() for n in before], [others[n].detach() for n in before]) < 1e-2
