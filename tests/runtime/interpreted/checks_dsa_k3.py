"""Kimi K3's gated latent attentions, dense and sparse, that a plan installs, in Triton's CPU interpreter, fp32.

Against the module's own forward with the same adapters, with and without documents in a row.
Legend: B rows, S tokens a row, K selected keys.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.checkpoints.models.kimi_k3.attention import (  # noqa: E402
    GatedLatentAttention,
    GatedSparseAttention,
    apart,
)
from shardwright.kernels.registry import source_sha256  # noqa: E402
from shardwright.runtime.experts.balance import LoadMeter  # noqa: E402
from shardwright.runtime.fuse import fusions_off, install_fusions  # noqa: E402
from shardwright.runtime.fused_dsa_layer import DenseLatentAttention  # noqa: E402
from shardwright.runtime.fused_dsa_loss import fused_layers, indexer_loss_for  # noqa: E402
from shardwright.runtime.lora.linear import LoraLinear  # noqa: E402
from shardwright.runtime.segments import bounds_of, segments  # noqa: E402
from shardwright.schemas.errors import LegalityError  # noqa: E402
from shardwright.schemas.fusion import FusionDecision  # noqa: E402
from shardwright.schemas.recipe import DataSpec, IndexerSpec, Recipe  # noqa: E402

B, S, K = 2, 8, 4
TOLERANCE = 1e-5
CONFIG = SimpleNamespace(
    hidden_size=32,
    num_attention_heads=2,
    qk_nope_head_dim=8,
    qk_rope_head_dim=16,
    v_head_dim=16,
    kv_lora_rank=16,
    q_lora_rank=24,
    latent_norm_eps=1e-6,
    index_n_heads=16,
    index_head_dim=32,
    index_topk=K,
)
ROLES = {
    "q_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_b_weight": "kv_b_proj.weight",
    "o": "o_proj",
    "gate": "g_proj",
}
INDEXER = {
    "index_q": "indexer.wq_b",
    "index_k": "indexer.wk",
    "index_norm": "indexer.k_norm",
    "index_weights": "indexer.weights_proj",
}


class Model(nn.Module):
    """One attention, adapters on every projection that is not the indexer's."""

    def __init__(self, kind: type[GatedLatentAttention], **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = kind(SimpleNamespace(**{**vars(CONFIG), **changes}))
        self.requires_grad_(False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        for child in ("q_a_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "o_proj", "g_proj"):
            made = LoraLinear(getattr(self.attention, child), 4, 0.5, 0.0, torch.float32)
            nn.init.normal_(made.lora_a, std=0.2)
            nn.init.normal_(made.lora_b, std=0.2)
            setattr(self.attention, child, made)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.attention(x, mask)


def decision(form: str, **changes: Any) -> FusionDecision:
    sparse = form == "own"
    constants: dict[str, Any] = {
        "nope": 8,
        "rope": 16,
        "value": 16,
        "scale": str(24**-0.5),
        "layout": "none",
        "top_k": K if sparse else 0,
        "form": form,
        "call": "mask",
        **({"index_layout": "none", "index_first": True, "index_scale": str((16 * 32) ** -0.5)} if sparse else {}),
    }
    return FusionDecision(
        proposal_id="latent",
        pattern="gated_latent_attention",
        variant="kernel",
        provider="shardwright",
        op="dsa",
        modules=("attention",),
        roles={**ROLES, **(INDEXER if sparse else {})},
        constants={**constants, **changes},
        source_sha256=source_sha256("dsa"),
        tolerance="0.02",
    )


def run(model: Model, mask: Tensor | None) -> list[Tensor]:
    """Output and the gradient of every adapter and of the input."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(B, S, CONFIG.hidden_size, generator=generator).requires_grad_()
    y = model(x, mask)
    learning = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), learning)]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def two_documents() -> Tensor:
    """Positions of a row of one document and one of two."""
    return torch.stack([torch.arange(S), torch.cat([torch.arange(3), torch.arange(S - 3)])])


@pytest.mark.parametrize(("kind", "form"), [(GatedLatentAttention, "dense"), (GatedSparseAttention, "own")])
def test_installed_equals_the_module(kind: type[GatedLatentAttention], form: str) -> None:
    model = Model(kind)
    positions = two_documents()
    masks = (None, apart(positions))
    expected = [run(model, mask) for mask in masks]
    assert all(float(part.abs().max()) > 0 for part in expected[0])
    assert distance(expected[0], expected[1]) > 100 * TOLERANCE, "documents change nothing here"
    install_fusions(model, (decision(form),))
    for mask, wanted in zip(masks, expected, strict=True):
        assert distance(run(model, mask), wanted) < TOLERANCE
    with segments(bounds_of(positions)):
        assert distance(run(model, masks[1]), expected[1]) < TOLERANCE
    (layer,) = fused_layers(model)
    assert isinstance(layer, DenseLatentAttention) == (form == "dense")
    assert layer.choice(S).path == ("dense" if form == "dense" else "sparse")


def test_what_the_structure_agent_decides_installs(decided: Any) -> None:
    """Roles and constants as the pattern binds them, not as they are written here."""
    from shardwright.agents.structure.patterns.mla_gated import GatedLatentAttention as Found

    shapes = [((2, 12, CONFIG.hidden_size), torch.bfloat16), ((2, 1, 12, 12), torch.bool)]
    for kind, form in ((GatedLatentAttention, "dense"), (GatedSparseAttention, "own")):
        made = decided(Found(), lambda kind=kind: Wrapped(kind(CONFIG)), shapes, "attention")
        wanted = decision(form)
        assert {name: made.constants[name] for name in wanted.constants} == wanted.constants
        assert made.roles == wanted.roles
        install_fusions(Model(kind), (made,))


class Wrapped(nn.Module):
    """A layer around an attention."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.inner(x, mask)


def test_a_sparse_layer_whose_rows_select_all_runs_dense() -> None:
    model = Model(GatedSparseAttention, index_topk=64)
    expected = run(model, None)
    install_fusions(model, (decision("own", top_k=64),))
    assert fused_layers(model)[0].choice(S).path == "dense"
    assert distance(run(model, None), expected) < TOLERANCE


def test_documents_that_the_host_knows_are_attended_to_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask of all pairs is made then: a library's causal attention runs each."""
    model = Model(GatedLatentAttention)
    positions = two_documents()
    expected = run(model, apart(positions))
    install_fusions(model, (decision("dense"),))
    from shardwright.kernels.dsa import dense

    seen: list[int] = []
    own = dense._dense
    monkeypatch.setattr(dense, "_dense", lambda q, k, v, scale: (seen.append(q.shape[0]), own(q, k, v, scale))[1])
    with segments(bounds_of(positions)):
        assert distance(run(model, apart(positions)), expected) < TOLERANCE
    assert seen == [S, 3, S - 3]


def test_padding_runs_the_modules_own_forward() -> None:
    model = Model(GatedLatentAttention)
    valid = torch.ones(B, S, dtype=torch.long)
    valid[0, :3] = 0
    expected = run(model, valid)
    install_fusions(model, (decision("dense"),))
    assert distance(run(model, valid), expected) == 0


def test_a_mask_of_other_places_is_refused() -> None:
    model = Model(GatedLatentAttention)
    install_fusions(model, (decision("dense"),))
    mask = torch.ones(S, S, dtype=torch.bool).tril().repeat(B, 1, 1, 1)
    mask[0, 0, 5, 2] = False
    with pytest.raises(LegalityError, match="differs from causal documents at 1 of") as caught:
        model(torch.zeros(B, S, CONFIG.hidden_size), mask)
    assert caught.value.code == "legality/fusion-dsa"


def sparse_model() -> Model:
    """With adapters on the indexer, keys nearly alike: rounding them changes the choice."""
    model = Model(GatedSparseAttention)
    indexer = model.attention.indexer
    nn.init.constant_(indexer.k_norm.weight, 0.01)
    nn.init.ones_(indexer.k_norm.bias)
    for child in ("wq_b", "wk", "weights_proj"):
        made = LoraLinear(getattr(indexer, child), 4, 0.5, 0.0, torch.float32)
        nn.init.normal_(made.lora_a, std=0.2)
        nn.init.normal_(made.lora_b, std=0.001)
        setattr(indexer, child, made)
    return model


def learned(model: Model, mask: Tensor | None) -> dict[str, Tensor]:
    x = torch.randn(B, S, CONFIG.hidden_size, generator=torch.Generator().manual_seed(5))
    learning = {name: part for name, part in model.named_parameters() if part.requires_grad}
    found = torch.autograd.grad(model(x, mask).square().sum(), list(learning.values()), allow_unused=True)
    return {name: part for name, part in zip(learning, found, strict=True) if part is not None}


@pytest.mark.parametrize("settings", [{"loss": "0.5"}, {"loss": "0.5", "stage": "dense"}, {"scores": "fp8"}])
def test_the_recipe_is_obeyed_by_both_ways_of_the_live_module_and_by_the_plain_one(settings: dict[str, str]) -> None:
    """Every gradient with fusions on, off, and of the plain module; two documents in a row."""
    model, plain = sparse_model(), sparse_model()
    positions = torch.stack([torch.arange(S), torch.cat([torch.arange(3), torch.arange(S - 3)])])
    mask = apart(positions)
    before = learned(plain, mask)
    switches = install_fusions(model, (decision("own"),))
    recipe = Recipe(data=DataSpec(train="a", held_out="b"), indexer=IndexerSpec(**settings))
    plan: Any = SimpleNamespace(
        decision=SimpleNamespace(recipe=recipe, strategy=SimpleNamespace(micro_batch_sequences=2))
    )
    loss = indexer_loss_for(plan, model, LoadMeter())
    assert loss is not None
    loss.put_on_plain(plain)
    fused = learned(model, mask)
    with fusions_off(switches):
        unfused = learned(model, mask)
    assert len([name for name in fused if "indexer" in name]) == (6 if "loss" in settings else 0)
    for other in (unfused, learned(plain, mask)):
        assert {*other} == {*fused}
        assert max(float((fused[n] - other[n]).abs().max() / other[n].abs().max()) for n in fused) < 1e-4
    apart_by = max(float((fused[n] - before[n]).abs().max() / before[n].abs().max()) for n in before)
    assert apart_by < 1e-4 if settings == {"loss": "0.5"} else apart_by > 1e-2
