"""Layers of real families train with the kernels in them as they train without. Runs under TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.kernels.registry import source_sha256  # noqa: E402
from shardwright.runtime.fuse import install_fusions  # noqa: E402
from shardwright.schemas.fusion import FusionDecision  # noqa: E402

HIDDEN = 24


def layer_of(family: str) -> tuple[nn.Module, str, str]:
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    if family == "kimi_linear":
        settings = transformers.KimiLinearConfig(hidden_size=HIDDEN, num_hidden_layers=2)
        settings.linear_num_heads, settings.linear_head_dim = 1, 64
        found = module.KimiLinearDeltaAttention(settings, layer_idx=0), "kda", "chunk_kimi_delta_attention"
    else:
        sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
        sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
        settings = transformers.Qwen3NextConfig(hidden_size=HIDDEN, num_hidden_layers=2, **sizes)
        found = module.Qwen3NextGatedDeltaNet(settings, layer_idx=0), "gated_delta", "torch_chunk_gated_delta_rule"
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for value in found[0].parameters():
            value.normal_(0.0, 0.2, generator=generator)
    return found


def trained(layer: nn.Module, steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the parameters after the last step."""
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(1, 9, HIDDEN, generator=generator) for _ in range(2))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = (layer(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [value.detach().clone() for value in layer.parameters()]


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next"])
def test_a_layer_trains_as_without(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, op, rule = layer_of(family)
    wanted, _ = trained(plain)
    fused, _, _ = layer_of(family)
    decision = FusionDecision(
        proposal_id="delta_rule.1",
        pattern="delta_rule",
        variant="kernel",
        provider="shardwright",
        op=op,
        modules=("0",),
        roles={},
        constants={"rule": f"{type(fused).__module__}:{rule}"},
        source_sha256=source_sha256(op),
        tolerance="0.02",
    )
    (switch,) = install_fusions(nn.ModuleList([fused]), (decision,))
    losses, _ = trained(fused)
    assert wanted[-1] < wanted[0]
    assert losses == pytest.approx(wanted, rel=1e-4)

    def refused(*given: Any, **named: Any) -> None:
        raise AssertionError("the family's own function ran")

    monkeypatch.setattr(f"{type(fused).__module__}.{rule}", refused)
    fused(torch.zeros(1, 2, HIDDEN))
    switch.fused = False
    with pytest.raises(AssertionError, match="own function"):
        fused(torch.zeros(1, 2, HIDDEN))
