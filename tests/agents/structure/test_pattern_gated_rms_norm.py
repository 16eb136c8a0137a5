"""Gated RMSNorm as the linear-attention families spell it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.patterns.gated_rms_norm import GatedRmsNorm
from shardwright.agents.structure.testkit import PatternContract, meta


def unit(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def wide(w: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (w.to(torch.float32) * unit(x) * torch.sigmoid(gate.to(torch.float32))).to(x.dtype)


def rounded(w: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (w * unit(x).to(x.dtype) * F.silu(gate.to(torch.float32))).to(x.dtype)


def inner_read(w: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    body = unit(x)
    return (w.to(torch.float32) * body * torch.sigmoid(gate.to(torch.float32))).to(x.dtype) + body.sum().to(x.dtype)


def overwritten(w: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    body = unit(x)
    x.add_(1.0)
    return (w.to(torch.float32) * body * torch.sigmoid(gate.to(torch.float32))).to(x.dtype)


NEARLY: dict[str, Callable[..., torch.Tensor]] = {
    "gate-not-widened": lambda w, x, g: (w.to(torch.float32) * unit(x) * torch.sigmoid(g)).to(x.dtype),
    "tanh-gate": lambda w, x, g: (w.to(torch.float32) * unit(x) * torch.tanh(g.to(torch.float32))).to(x.dtype),
    "summed-not-meaned": lambda w, x, g: (
        w.to(torch.float32)
        * (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + 1e-6))
        * g.float().sigmoid()
    ).to(x.dtype),
    "gate-first": lambda w, x, g: (w.to(torch.float32) * unit(x * torch.sigmoid(g))).to(x.dtype),
    "inner-read": inner_read,
    "overwritten-between": overwritten,
}


def example(function: Callable[..., torch.Tensor]):  # type: ignore[no-untyped-def]
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return function(self.weight, x, gate)

    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.o_norm = Norm()

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return self.o_norm(x, gate)

    return lambda: (InLayer(), (meta(2, 6, 4, 32), meta(2, 6, 4, 32)))


def hooked():  # type: ignore[no-untyped-def]
    layer, tensors = example(wide)()
    layer.o_norm.register_full_backward_hook(lambda module, gradients, results: None)
    return layer, tensors


class TestGatedRmsNorm(PatternContract):
    pattern = GatedRmsNorm()
    positives = {"wide": (example(wide), 1), "rounded": (example(rounded), 1)}
    near_misses = {"gradient-hook": hooked, **{name: example(function) for name, function in NEARLY.items()}}

    def test_constants(self) -> None:
        found = {name: self.found(kind)[0][0].constants for name, (kind, _) in self.positives.items()}
        assert found["wide"] == {"eps": 1e-6, "form": "wide", "act": "sigmoid"}
        assert found["rounded"] == {"eps": 1e-6, "form": "rounded", "act": "silu"}
