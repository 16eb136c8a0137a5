"""Attention residuals in both published spellings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.agents.structure.patterns.attention_residual import AttentionResidual
from shardwright.agents.structure.patterns.base import Match, VariantSpec
from shardwright.agents.structure.rank import unverified
from shardwright.agents.structure.testkit import Example, PatternContract, captured_examples, meta
from shardwright.checkpoints.models.kimi_k3.residuals import ResidualMix, mix, read
from shardwright.kernels import evidence


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


class ReadsRows(nn.Module):
    """A layer of Kimi K3 as far as its mix: earlier rows and the running sum, each a tensor of its own."""

    mix_class: type[nn.Module] = ResidualMix

    def __init__(self) -> None:
        super().__init__()
        self.res_norm = self.mix_class(64, 1e-6)
        self.res_proj = nn.Linear(64, 1, bias=False)

    def forward(self, hidden: torch.Tensor, *snapshots: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.res_norm((*snapshots, hidden), self.res_proj.weight)
        return mixed + 1


class SpelledInLayer(ReadsRows):
    """The layer mixes by itself: no module does that alone."""

    def forward(self, hidden: torch.Tensor, *snapshots: torch.Tensor) -> torch.Tensor:
        return read((*snapshots, hidden), self.res_norm.weight, self.res_proj.weight, 1e-6) + 1  # type: ignore[arg-type]


class NormedAfter(ResidualMix):
    """The module does more than mix."""

    def forward(self, rows: Sequence[torch.Tensor], projection: torch.Tensor) -> torch.Tensor:
        return super().forward(rows, projection) * 2


class OtherCall(ResidualMix):
    def forward(self, projection: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same, called otherwise."""
        return super().forward(rows, projection)


class CallsOther(ReadsRows):
    mix_class = OtherCall

    def forward(self, hidden: torch.Tensor, *snapshots: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.res_norm(self.res_proj.weight, (*snapshots, hidden))
        return mixed + 1


class MixesMore(ReadsRows):
    mix_class = NormedAfter


class StackUsedTwice(ReadsRows):
    """The rows side by side go elsewhere too, so they stay one tensor."""

    def forward(self, hidden: torch.Tensor, *snapshots: torch.Tensor) -> torch.Tensor:
        rows = torch.stack((*snapshots, hidden), dim=-2)
        return mix(rows, self.res_norm.weight, self.res_proj.weight, 1e-6) + rows.sum(-2)  # type: ignore[arg-type]


def reads(kind: type[ReadsRows], rows: int = 3) -> Example:
    return lambda: (kind(), tuple(meta(2, 6, 64) for _ in range(rows)))


class TestAttentionResidual(PatternContract):
    pattern = AttentionResidual()
    positives = {
        "one by one": (reads(ReadsRows), 1),
        "one row": (reads(ReadsRows, 1), 1),
        "nine rows": (reads(ReadsRows, 9), 1),
        "scored": (inside(Scored), 1),
        "attended": (inside(Attended), 1),
    }
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

    def test_rows_are_bound_in_their_order(self) -> None:
        """The oldest first and the running sum last, whatever the order in which they came into the layer."""
        ((match, _),) = self.found(self.positives["one by one"][0])
        rows = [role for role in match.region.inputs if role.startswith("row_")]
        names = [match.region.canonical.by_id[match.region.inputs[role]].target for role in rows]
        assert rows == ["row_0", "row_1", "row_2"] and names == ["tensors_1", "tensors_2", "tensors_0"]
        assert match.roles == {"norm": "weight"} and match.anchor == "layer.res_norm"
        assert set(match.parameters.values()) == {"layer.res_norm.weight", "layer.res_proj.weight"}
        assert self.pattern.cost_shape(match, 24) == {"T": 24, "R": 3, "H": 64}

    @pytest.mark.parametrize(
        ("kind", "why"),
        [
            (ReadsRows, ""),
            (SpelledInLayer, "layer also computes add"),
            (MixesMore, "layer.res_norm also computes mul"),
            (CallsOther, "layer.res_norm takes projection, rows, not rows and a projection"),
            (StackUsedTwice, "the rows come as one tensor, and the operator reads each where it lies"),
        ],
    )
    def test_only_a_module_that_mixes_rows_and_nothing_else_is_exchanged(self, kind: type[ReadsRows], why: str) -> None:
        """All five regions are legal; what a worker can put in their place is another matter."""
        ((match, certificate),) = self.found(reads(kind))
        assert certificate.legal
        assert self.pattern.refuses(match, ours(match)).startswith(why) and bool(why) == bool(
            self.pattern.refuses(match, ours(match))
        )

    def test_no_plan_runs_it_before_a_device_has_verified_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(evidence, "SHIPPED", tmp_path)
        (pair, *_), _ = captured_examples(reads(ReadsRows))
        (match,) = self.pattern.find(*pair)
        assert "no device has verified attention_residual at its present source" in unverified(match, ours(match))
        assert [unverified(match, spec) for spec in self.pattern.variants() if spec.provider != "shardwright"] == [
            "",
            "",
        ]


def ours(match: Match) -> VariantSpec:
    (spec,) = [spec for spec in match.pattern.variants() if spec.provider == "shardwright"]
    return spec
