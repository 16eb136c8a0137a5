"""Projections of one input merged as views: q/k/v of an attention, gate and up of an MLP."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.obligations import reversible_layout, tied_weights
from shardwright.agents.structure.patterns.gate_up_merge import GateUpMerge
from shardwright.agents.structure.patterns.merging import MergedProjections
from shardwright.agents.structure.patterns.qkv_merge import QkvMerge
from shardwright.agents.structure.testkit import Example, PatternContract, captured_examples, meta


class Attention(nn.Module):
    """Four heads over two of keys."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(64, 64, bias=bias), nn.Linear(64, 64, bias=False)
        self.k_proj, self.v_proj = nn.Linear(64, 32, bias=bias), nn.Linear(64, 32, bias=bias)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (value.unflatten(-1, (-1, 16)).transpose(1, 2) for value in self.heads(x))
        k, v = (value.repeat_interleave(2, dim=1) for value in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Biased(Attention):
    def __init__(self) -> None:
        super().__init__(bias=True)


class Spelled(Attention):
    """The product written out: a softmax between two matrix products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (value.unflatten(-1, (-1, 16)).transpose(1, 2) for value in self.heads(x))
        k, v = (value.repeat_interleave(2, dim=1) for value in (k, v))
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * 0.25, dim=-1)
        return self.o_proj(torch.matmul(weights, v).transpose(1, 2).flatten(-2))


class EachItsInput(Attention):
    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q_proj(x), self.k_proj(x + 1.0), self.v_proj(x * 2.0)


class OneMatrix(Attention):
    """Keys and values of one parameter: it cannot be two places of the merged matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.v_proj.weight = self.k_proj.weight

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q_proj(x + 1.0), self.k_proj(x), self.v_proj(x)


class ForeignBias(Biased):
    """A projection that adds the bias of another."""

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q_proj(x), F.linear(x, self.k_proj.weight, self.v_proj.bias), self.v_proj(x)


class WrittenBetween(Attention):
    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = x + 1.0
        q = self.q_proj(x)
        x.mul_(2.0)
        k = self.k_proj(x)
        x.mul_(2.0)
        return q, k, self.v_proj(x)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Situ(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        g, u = self.gate_proj(x).float(), self.up_proj(x).float()
        left = torch.tanh(g / 4.0) * 4.0 * torch.sigmoid(g)
        return self.down_proj((left * (torch.tanh(u / 25.0) * 25.0)).to(x.dtype))


class TwoInputs(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x + 1.0))


class NoGate(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class AlreadyMerged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(64, 192, bias=False), nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class WrittenMlp(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1.0
        gate = self.gate_proj(x)
        x.mul_(2.0)
        return self.down_proj(F.silu(gate) * self.up_proj(x))


def inside(kind: type[nn.Module], name: str) -> Example:
    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, kind())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, name)(x)

    return lambda: (InLayer(), (meta(2, 6, 64),))


class TestQkvMerge(PatternContract):
    pattern = QkvMerge()
    positives = {
        "grouped-heads": (inside(Attention, "self_attn"), 1),
        "biased": (inside(Biased, "self_attn"), 1),
        "spelled": (inside(Spelled, "self_attn"), 1),
    }
    near_misses = {
        "each-its-input": inside(EachItsInput, "self_attn"),
        "one-matrix": inside(OneMatrix, "self_attn"),
        "foreign-bias": inside(ForeignBias, "self_attn"),
        "written-between": inside(WrittenBetween, "self_attn"),
        "an-mlp": inside(Mlp, "mlp"),
    }

    def test_roles_name_the_projections(self) -> None:
        ((match, _),) = self.found(inside(Attention, "self_attn"))
        assert match.roles == {name: name for name in ("k_proj", "q_proj", "v_proj")}
        assert match.anchor == "layer.self_attn"
        assert match.pattern.cost_shape(match, 24) == {"T": 24, "H": 64, "N": 128, "P": 3}


class TestGateUpMerge(PatternContract):
    pattern = GateUpMerge()
    positives = {"swiglu": (inside(Mlp, "mlp"), 1), "situ": (inside(Situ, "mlp"), 1)}
    near_misses = {
        "two-inputs": inside(TwoInputs, "mlp"),
        "no-known-gate": inside(NoGate, "mlp"),
        "already-merged": inside(AlreadyMerged, "mlp"),
        "written-between": inside(WrittenMlp, "mlp"),
    }


def test_a_tied_matrix_is_not_merged() -> None:
    pairs, facts = captured_examples(inside(Mlp, "mlp"))
    (match,) = GateUpMerge().find(*pairs[0])
    tied = replace(facts, tied={"layer.mlp.up_proj.weight": ("embed.weight",)})
    assert tied_weights(match, tied)[0] == "refuted"
    assert not certify(match, tied).legal


def test_a_layout_that_does_not_come_back_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, facts = captured_examples(inside(Mlp, "mlp"))
    (match,) = GateUpMerge().find(*pairs[0])
    assert reversible_layout(match, facts)[0] == "proved"
    monkeypatch.setattr(torch, "cat", lambda values, dim=0: torch.concat(values[::-1], dim))
    status, why = reversible_layout(match, facts)
    assert status == "refuted" and "do not come back" in why
    monkeypatch.undo()
    monkeypatch.setattr(MergedProjections, "inverse", lambda self, match: "")
    assert reversible_layout(match, facts)[0] == "unknown"
