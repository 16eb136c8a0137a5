"""Linear-attention layers train with all their operators as they train without. Runs under TRITON_INTERPRET=1, fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.kernels import interpreter

interpreter.install()

from shardwright.agents.structure.join import decimal_text  # noqa: E402
from shardwright.agents.structure.patterns.delta_rule_layer import DeltaRuleLayer  # noqa: E402
from shardwright.agents.structure.testkit import captured_examples  # noqa: E402
from shardwright.kernels.registry import source_sha256  # noqa: E402
from shardwright.runtime.fuse import install_fusions  # noqa: E402
from shardwright.runtime.segments import segments  # noqa: E402
from shardwright.schemas.fusion import FusionDecision  # noqa: E402

HIDDEN, WIDTH, TOKENS = 24, 64, 9
BOUNDS = ((0, 4, TOKENS),)


def layer_of(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    home = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    if family == "kimi_linear":
        settings = transformers.KimiLinearConfig(hidden_size=HIDDEN, num_hidden_layers=2)
        settings.linear_num_heads, settings.linear_head_dim = 1, WIDTH
        layer: nn.Module = home.KimiLinearDeltaAttention(settings, layer_idx=0)
    else:
        sizes = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
        sizes |= {"linear_key_head_dim": WIDTH, "linear_value_head_dim": WIDTH}
        settings = transformers.Qwen3NextConfig(hidden_size=HIDDEN, num_hidden_layers=2, **sizes)
        layer = home.Qwen3NextGatedDeltaNet(settings, layer_idx=0)
    return layer


def with_values(layer: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for value in layer.parameters():
            value.normal_(0.0, 0.2, generator=generator)
    return layer.float()


def decision_of(family: str) -> FusionDecision:
    given = (torch.empty(2, 12, HIDDEN, dtype=torch.bfloat16, device="meta"),)
    (pair, *_), _ = captured_examples(lambda: (layer_of(family), given))
    (match,) = DeltaRuleLayer().find(*pair)
    op, *others = str(match.constants["operators"]).split()
    constants = {k: decimal_text(v) if isinstance(v, float) else v for k, v in match.constants.items()}
    return FusionDecision(
        proposal_id="delta_rule_layer.1",
        pattern="delta_rule_layer",
        variant="kernel",
        provider="shardwright",
        op=op,
        modules=("0",),
        roles=match.roles,
        constants={name: value for name, value in constants.items() if not isinstance(value, list)},
        source_sha256=source_sha256(op),
        beside={other: source_sha256(other) for other in others},
        tolerance="0.02",
    )


def trained(layer: nn.Module, steps: int = 2) -> tuple[list[float], list[Tensor]]:
    """Losses, and the gradients of the first step."""
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(1, TOKENS, HIDDEN, generator=generator) for _ in range(2))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses: list[float] = []
    first: list[Tensor] = []
    for _ in range(steps):
        loss = (layer(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        first = first or [value.grad.clone() for value in layer.parameters() if value.grad is not None]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, first


@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next"])
def test_a_layer_trains_as_without(family: str) -> None:
    """Losses and gradients to 1e-5 of the largest; documents of one row as each alone."""
    wanted, gradients = trained(with_values(layer_of(family)))
    fused = with_values(layer_of(family))
    (switch,) = install_fusions(nn.ModuleList([fused]), (decision_of(family),))
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))
    switch.fused = False
    alone = torch.cat([fused(x[:, :4]), fused(x[:, 4:])], dim=1)
    switch.fused = True
    with segments(BOUNDS), torch.no_grad():
        found: Any = fused(x)
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5 * float(alone.detach().abs().max()))
    losses, ours = trained(fused)
    assert wanted[-1] < wanted[0]
    assert losses == pytest.approx(wanted, rel=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for a, b in zip(ours, gradients, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * max(float(b.abs().max()), 1e-2 * largest)
