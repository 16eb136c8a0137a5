"""A linear-attention layer with its recurrence exchanged computes and learns what the family's own layer does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.kernels.gated_delta.reference import gated_delta_recurrent_reference
from shardwright.kernels.kda.reference import kda_recurrent_reference
from shardwright.kernels.registry import OPERATORS, source_sha256
from shardwright.runtime.fuse import fusions_off, install_fusions
from shardwright.runtime.fused_delta_rule import fused_delta_rule
from shardwright.runtime.segments import segments
from shardwright.schemas.errors import LegalityError, StalePlanError
from shardwright.schemas.fusion import FusionDecision

HIDDEN = 32


def layer_of(family: str) -> tuple[nn.Module, str, str]:
    """A small layer of a family → (layer, operator, name of its rule)."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    heads = {"linear_num_heads": 2, "linear_head_dim": 8}
    named: dict[str, tuple[str, str, dict[str, Any]]] = {
        "kimi_linear": ("KimiLinearDeltaAttention", "KimiLinearConfig", heads),
        "bailing_hybrid": ("BailingHybridDeltaAttention", "BailingHybridConfig", heads),
        "glm5_next": ("Glm5NextTextLinearAttention", "Glm5NextTextConfig", heads),
        "qwen3_next": ("Qwen3NextGatedDeltaNet", "Qwen3NextConfig", {}),
        "qwen3_5": ("Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig", {}),
    }
    made, config, sizes = named[family]
    if family.startswith("qwen"):
        sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
        sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    settings = getattr(transformers, config)(hidden_size=HIDDEN, num_hidden_layers=2, **sizes)
    for name, value in sizes.items():
        setattr(settings, name, value)
    torch.manual_seed(0)
    layer = getattr(module, made)(settings, layer_idx=0).float()
    with torch.no_grad():
        for value in layer.parameters():
            value.normal_(0.0, 0.3)
    if family.startswith("qwen"):
        return layer, "gated_delta", "torch_chunk_gated_delta_rule"
    return layer, "kda", "chunk_kimi_delta_attention"


def decision_of(layer: nn.Module, op: str, rule: str, **changed: Any) -> FusionDecision:
    named: dict[str, Any] = {
        "proposal_id": "delta_rule.1",
        "pattern": "delta_rule",
        "variant": "kernel",
        "provider": "shardwright",
        "op": op,
        "modules": ("0",),
        "roles": {},
        "constants": {"rule": f"{type(layer).__module__}:{rule}"},
        "source_sha256": source_sha256(op),
        "tolerance": "0.02",
    }
    return FusionDecision(**{**named, **changed})


def plain(op: str) -> Any:
    reference: Any = {"kda": kda_recurrent_reference, "gated_delta": gated_delta_recurrent_reference}[op]

    def run(*given: Tensor, decays: bool, **settings: Any) -> tuple[Tensor, Tensor]:
        assert decays and bool((given[3] <= 0).all())
        found: tuple[Tensor, Tensor] = reference(*given, **settings)
        return found

    return SimpleNamespace(load_op=lambda: run)


@pytest.mark.parametrize("family", ["kimi_linear", "bailing_hybrid", "glm5_next", "qwen3_next", "qwen3_5"])
def test_around_the_plain_recurrence_it_is_the_familys_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of all parameters, over a length that no chunk divides; off again by the switch."""
    layer, op, rule = layer_of(family)
    decision = decision_of(layer, op, rule)
    x = torch.randn(2, 70, HIDDEN, generator=torch.Generator().manual_seed(3)).requires_grad_()
    leaves = [x, *layer.parameters()]
    wanted = layer(x)
    first = torch.autograd.grad(wanted.square().sum(), leaves, allow_unused=True)
    called: list[str] = []
    entry = plain(op)
    inner = entry.load_op()
    entry.load_op = lambda: lambda *a, **k: (called.append(op), inner(*a, **k))[1]
    monkeypatch.setitem(OPERATORS, op, entry)
    monkeypatch.setattr("shardwright.runtime.fuse.source_sha256", lambda name: decision.source_sha256)
    switches = install_fusions(nn.ModuleList([layer]), (decision,))
    found = layer(x)
    assert called == [op]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.detach().abs().max()))
    second = torch.autograd.grad(found.square().sum(), leaves, allow_unused=True)
    for a, b in zip(second, first, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))
    with fusions_off(switches):
        assert torch.equal(layer(x), wanted)
    assert called == [op]


def test_documents_of_one_row_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, op, rule = layer_of("kimi_linear")
    decision = decision_of(layer, op, rule)
    monkeypatch.setitem(OPERATORS, op, plain(op))
    x = torch.randn(1, 12, HIDDEN, generator=torch.Generator().manual_seed(3))
    alone = torch.cat([layer(x[:, :5]), layer(x[:, 5:])], dim=1)
    forward = fused_delta_rule(layer, "0", decision)
    with segments(((0, 5, 12),)):
        found = forward(x)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
    assert float((forward(x) - alone).detach().abs().max()) > 1e-3


def test_another_rule_or_source_is_refused() -> None:
    layer, op, rule = layer_of("qwen3_next")
    with pytest.raises(LegalityError, match="fusion-delta-rule"):
        fused_delta_rule(layer, "0", decision_of(layer, op, "chunk_kimi_delta_attention"))
    with pytest.raises(LegalityError, match="fusion-delta-rule"):
        fused_delta_rule(nn.Linear(2, 2), "0", decision_of(layer, op, rule))
    with pytest.raises(StalePlanError, match="kernel-source"):
        install_fusions(nn.ModuleList([layer]), (decision_of(layer, op, rule, source_sha256="0" * 64),))
