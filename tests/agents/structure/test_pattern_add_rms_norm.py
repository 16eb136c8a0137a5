"""Residual add and RMSNorm inside a layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.patterns.add_rms_norm import AddRmsNorm
from shardwright.agents.structure.testkit import PatternContract, meta


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Layer(nn.Module):
    """A branch, its sum with the residual, a norm, and the sum used again."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.mlp = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.pre_norm, self.post_norm = Norm(), Norm()

    def total(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return residual + branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.total(x, self.branch(self.pre_norm(x)))
        return residual + self.mlp(self.post_norm(residual))


class Swapped(Layer):
    def total(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return torch.add(branch, residual)


class Difference(Layer):
    def total(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return residual - branch


class Weighted(Layer):
    def total(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return torch.add(residual, branch, alpha=2)


class WideSum(Layer):
    """The sum is made in fp32 and rounded once."""

    def total(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return (residual.float() + branch.float()).to(residual.dtype)


class DroppedSum(Layer):
    def total(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return F.dropout(residual + branch, 0.1)


class SumChanged(Layer):
    """The sum is written to between its two uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.total(x, self.branch(self.pre_norm(x)))
        normed = self.post_norm(residual)
        residual.mul_(0.5)
        return residual + self.mlp(normed)


class ScaledBranch(Layer):
    def total(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return residual + branch * 0.5


class BranchReadsInput(Layer):
    """The branch gets the layer's input without its norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x + self.branch(x)
        return residual + self.mlp(self.post_norm(residual)) * self.pre_norm(x)


class MlpReadsSum(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = x + self.branch(self.pre_norm(x))
        return residual + self.mlp(self.post_norm(residual) + residual)


class ThirdSum(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


class TwoResults(Layer):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), self.mlp(x)


def example(kind: type[nn.Module]):  # type: ignore[no-untyped-def]
    return lambda: (kind(), (meta(2, 6, 64),))


def hooked() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layer = Layer()
    layer.post_norm.register_forward_pre_hook(lambda module, args: None)
    return layer, (meta(2, 6, 64),)


class TestAddRmsNorm(PatternContract):
    pattern = AddRmsNorm()
    positives = {
        "plain": (example(Layer), 1),
        "swapped": (example(Swapped), 1),
        "scaled-branch": (example(ScaledBranch), 1),
    }
    near_misses = {
        "difference": example(Difference),
        "weighted": example(Weighted),
        "wide-sum": example(WideSum),
        "dropped-sum": example(DroppedSum),
        "sum-changed": example(SumChanged),
        "hooked": hooked,
    }

    def test_roles_do_not_depend_on_operand_order(self) -> None:
        for kind in (Layer, Swapped):
            match, _ = self.found(example(kind))[0]
            graph = match.region.canonical
            assert graph.by_id[match.region.inputs["branch"]].target == "linear"
            assert graph.by_id[match.region.inputs["residual"]].kind == "input"
            assert match.roles == {"norm": "post_norm", "first_norm": "pre_norm", "branch": "branch", "mlp": "mlp"}
            assert match.anchor == "layer"

    def test_a_kernel_stands_in_only_where_the_layer_is_two_sums(self) -> None:
        kernel = next(v for v in self.pattern.variants() if v.provider == "shardwright")
        assert self.pattern.refuses(self.found(example(Layer))[0][0], kernel) == ""
        for kind in (ScaledBranch, BranchReadsInput, MlpReadsSum, ThirdSum, TwoResults):
            ((match, certificate),) = self.found(example(kind))
            assert certificate.legal and set(match.roles) == {"norm"}, kind
            assert "exactly" in self.pattern.refuses(match, kernel), kind
