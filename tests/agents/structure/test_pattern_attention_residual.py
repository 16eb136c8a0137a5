"""Attention residuals in both published spellings."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.agents.structure.patterns.attention_residual import AttentionResidual
from shardwright.agents.structure.testkit import Example, PatternContract, meta
from shardwright.checkpoints.models.kimi_k3.residuals import mix


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64))


class Scored(nn.Module):
    """The model's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj = Norm(), nn.Linear(64, 1, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return mix(rows, self.norm.weight, self.proj.weight, 1e-6)


class Attended(nn.Module):
    """Normalised rows under one query."""

    scale = 64**-0.5

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(64))

    def normed(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = rows.float()
        value = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return value, value

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        keys, values = self.normed(rows)
        query = self.query.float().view(-1, 64).expand(*rows.shape[:-2], -1, -1)
        weights = torch.softmax(torch.matmul(query, keys.transpose(-2, -1)) * self.scale, dim=-1)
        return torch.matmul(weights, values).unbind(-2)[0]


class OtherValues(Attended):
    """Weights of normalised rows, mix of the rows as they are: neither form."""

    def normed(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().normed(rows)[0], rows.float()


class MixedNormed(Scored):
    """The mix is of normalised rows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1) + 1e-6)
        direction = self.norm.weight.float() * self.proj.weight.float().reshape(-1)
        weights = torch.softmax(torch.matmul(wide, direction) * scale, dim=-1)
        return (weights.unsqueeze(-1) * (wide * scale.unsqueeze(-1))).sum(-2).to(rows.dtype)


class OverHidden(Scored):
    """The softmax runs over another dimension."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1) + 1e-6)
        direction = self.norm.weight.float() * self.proj.weight.float().reshape(-1)
        weights = torch.softmax(torch.matmul(wide, direction) * scale, dim=1)
        return (weights.unsqueeze(-1) * wide).sum(-2).to(rows.dtype)


class WeightsUsed(Scored):
    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1) + 1e-6)
        direction = self.norm.weight.float() * self.proj.weight.float().reshape(-1)
        weights = torch.softmax(torch.matmul(wide, direction) * scale, dim=-1)
        return (weights.unsqueeze(-1) * wide).sum(-2).to(rows.dtype), weights


class SumOfOthers(Scored):
    """Scores of one set of rows, mix of another."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1) + 1e-6)
        direction = self.norm.weight.float() * self.proj.weight.float().reshape(-1)
        weights = torch.softmax(torch.matmul(wide, direction) * scale, dim=-1)
        return (weights.unsqueeze(-1) * (wide + 1.0)).sum(-2).to(rows.dtype)


def inside(kind: type[nn.Module]) -> Example:
    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = kind()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.read(rows)

    return lambda: (InLayer(), (meta(2, 6, 3, 64),))


class TestAttentionResidual(PatternContract):
    pattern = AttentionResidual()
    positives = {"scored": (inside(Scored), 1), "attended": (inside(Attended), 1)}
    near_misses = {
        "other-values": inside(OtherValues),
        "mixed-normed": inside(MixedNormed),
        "over-another-dimension": inside(OverHidden),
        "weights-used-elsewhere": inside(WeightsUsed),
        "sum-of-others": inside(SumOfOthers),
    }

    def test_forms_and_leaves_are_bound(self) -> None:
        ((scored, _),) = self.found(self.positives["scored"][0])
        ((attended, _),) = self.found(self.positives["attended"][0])
        assert (scored.constants["form"], attended.constants["form"]) == ("scored", "attended")
        assert scored.roles == {"norm": "norm.weight", "projection": "proj.weight"}
        assert attended.roles == {"query": "query"} and attended.constants["scale"] == 0.125
        assert self.pattern.cost_shape(scored, 24) == {"T": 24, "R": 3, "H": 64}
