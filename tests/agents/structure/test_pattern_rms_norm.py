"""RMSNorm: spellings that are the same function, and near misses that are not."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.patterns.rms_norm import RmsNorm
from shardwright.agents.structure.testkit import PatternContract, meta


class Norm(nn.Module):
    """The common spelling; subclasses change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps)).to(dtype)


class OtherSpelling(Norm):
    """x·x, a function for a method, swapped operands, reciprocal of the root."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.reciprocal(torch.sqrt(torch.mean(torch.mul(wide, wide), dim=(x.dim() - 1,), keepdim=True) + 1e-6))
        return (scale * wide).type_as(x) * self.weight


class ScaleThenCast(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (self.weight.float() * normalised).to(x.dtype)


class UnitOffset(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normalised * (1.0 + self.weight.float())).type_as(x)


class Native(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (64,), self.weight, 1e-6)


class Gated(Norm):
    """A norm and a gate in one module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * F.silu(x)


class CalledTwice(nn.Module):
    """One module, two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(x + 1.0)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Norm(), Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Escaping(Norm):
    """The inverse root is returned too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        wide = x.to(torch.float32)
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide * inverse).to(x.dtype), inverse


class EpsOutside(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide / (torch.sqrt(wide.pow(2).mean(-1, keepdim=True)) + 1e-6)).to(x.dtype)


class NarrowStatistics(Norm):
    """The mean square is rounded to bf16 first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x.pow(2).mean(-1, keepdim=True).to(torch.float32)
        return self.weight * (x.to(torch.float32) * torch.rsqrt(square + 1e-6)).to(x.dtype)


class ThroughHalf(Norm):
    """A second rounding to fp16 before the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normalised.to(torch.float16).to(x.dtype)


class OtherDimension(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-2, keepdim=True) + 1e-6)).to(x.dtype)


class Cube(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(3).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class InPlaceBetween(Norm):
    """The widened input is changed between its two uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        wide.mul_(2.0)
        return self.weight * (wide * inverse).to(x.dtype)


class InPlaceThroughView(Norm):
    """The same through another name of the memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        rows = wide.view(-1, 64)
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        rows.mul_(2.0)
        return self.weight * (wide * inverse).to(x.dtype)


class ResultChanged(Norm):
    """A caller writes to the result's memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.add_(1.0)
        return y


class Dropped(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        normalised = F.dropout(wide, 0.1) * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normalised.to(x.dtype)


def hooked() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layer = Twice()
    layer.first.register_forward_hook(lambda module, args, output: None)
    layer.second.register_full_backward_hook(lambda module, given, made: None)
    return layer, (meta(2, 6, 64),)


def gradient_hooked() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layer = InLayer(Norm)
    layer.norm = layer.norm.to(torch.bfloat16)
    layer.norm.weight.register_hook(lambda gradient: gradient)
    return layer, (meta(2, 6, 64),)


class InLayer(nn.Module):
    """A layer with one norm of a class."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def example(kind: type[nn.Module]):  # type: ignore[no-untyped-def]
    return lambda: (InLayer(kind), (meta(2, 6, 64),))


class TestRmsNorm(PatternContract):
    pattern = RmsNorm()
    positives = {
        "common": (example(Norm), 1),
        "other-spelling": (example(OtherSpelling), 1),
        "scale-then-cast": (example(ScaleThenCast), 1),
        "unit-offset": (example(UnitOffset), 1),
        "native": (example(Native), 1),
        "twice": (lambda: (Twice(), (meta(2, 6, 64),)), 2),
    }
    near_misses = {
        "escaping": example(Escaping),
        "eps-outside-the-root": example(EpsOutside),
        "narrow-statistics": example(NarrowStatistics),
        "through-half": example(ThroughHalf),
        "other-dimension": example(OtherDimension),
        "cube": example(Cube),
        "in-place-between": example(InPlaceBetween),
        "in-place-through-view": example(InPlaceThroughView),
        "result-changed": example(ResultChanged),
        "dropout": example(Dropped),
        "hooked": hooked,
        "gradient-hook": gradient_hooked,
    }

    def test_spellings_share_one_digest(self) -> None:
        from shardwright.agents.structure.region import canonical_region

        digests = {canonical_region(self.found(example(kind))[0][0].region).digest for kind in (Norm, OtherSpelling)}
        assert len(digests) == 1

    def test_forms_are_told_apart(self) -> None:
        forms = [
            self.found(example(kind))[0][0].constants["form"] for kind in (Norm, ScaleThenCast, UnitOffset, Native)
        ]
        assert forms == ["cast-then-scale", "scale-then-cast", "unit-offset", "native"]

    def test_epsilon_is_bound(self) -> None:
        class Wider(Norm):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                wide = x.to(torch.float32)
                return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)).to(x.dtype)

        assert [self.found(example(kind))[0][0].constants["eps"] for kind in (Norm, Wider)] == [1e-6, 1e-3]

    def test_a_kernel_replaces_only_a_module_that_does_nothing_else(self) -> None:
        kernel = next(v for v in self.pattern.variants() if v.provider == "shardwright")
        assert self.pattern.refuses(self.found(example(Norm))[0][0], kernel) == ""
        for kind in (Gated, CalledTwice):
            for match, certificate in self.found(example(kind)):
                assert certificate.legal
                assert "also computes" in self.pattern.refuses(match, kernel)

    def test_reasons_name_the_broken_obligation(self) -> None:
        expected = {
            Escaping: "no-escaping-value",
            InPlaceBetween: "no-mutation-or-alias",
            ResultChanged: "no-mutation-or-alias",
        }
        for kind, name in expected.items():
            for _, certificate in self.found(example(kind)):
                assert name in certificate.refused_because()
        for factory in (hooked, gradient_hooked):
            assert all("hooks: refuted" in c.refused_because() for _, c in self.found(factory))
            assert self.found(factory)
