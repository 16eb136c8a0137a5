"""Rotary embedding in both layouts, whole and partial."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.agents.structure.patterns.rope import Rope
from shardwright.agents.structure.testkit import PatternContract, meta


def half(x: torch.Tensor) -> torch.Tensor:
    middle = x.shape[-1] // 2
    return torch.cat((-x[..., middle:], x[..., :middle]), dim=-1)


class HalfSplit(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):  # type: ignore[no-untyped-def]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return (q * cos) + (half(q) * sin), (k * cos) + (half(k) * sin)


class Partial(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):  # type: ignore[no-untyped-def]
        cos, sin = cos.unsqueeze(1)[..., :8], sin.unsqueeze(1)[..., :8]
        turned, kept = q[..., :8], q[..., 8:]
        return torch.cat([half(turned) * sin + turned * cos, kept], dim=-1), k


class Interleaved(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):  # type: ignore[no-untyped-def]
        cos, sin = cos[..., :8].unsqueeze(1), sin[..., :8].unsqueeze(1)
        a, b = q[..., 0::2], q[..., 1::2]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1), k


def changed(function):  # type: ignore[no-untyped-def]
    """A module that turns only the queries, by a function of (q, cos, sin)."""

    class Changed(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):  # type: ignore[no-untyped-def]
            return function(q, cos.unsqueeze(1), sin.unsqueeze(1)), k

    return Changed


def turned_back(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    back = torch.cat((q[..., 8:], -q[..., :8]), dim=-1)
    return q * cos + back * sin


def read_elsewhere(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    other = half(q)
    return q * cos + other * sin + other.sum()


def overwritten(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    other = half(q)
    q.mul_(2.0)
    return q * cos + other * sin


NEARLY = {
    "turned-back": turned_back,
    "two-inputs": lambda q, c, s: q * c + half(q + 1.0) * s,
    "uneven-halves": lambda q, c, s: q * c + torch.cat((-q[..., 6:], q[..., :6]), dim=-1) * s,
    "sine-twice": lambda q, c, s: q * c + half(q) * s * s,
    "read-elsewhere": read_elsewhere,
    "overwritten-between": overwritten,
    "interleaved-but-halves": lambda q, c, s: torch.cat(
        [q[..., :8] * c[..., :8] + q[..., 8:] * s[..., :8], q[..., 8:] * c[..., :8] - q[..., :8] * s[..., :8]], dim=-1
    ),
}


def example(kind: type[nn.Module], width: int = 16):  # type: ignore[no-untyped-def]
    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = kind()

        def forward(self, *values: torch.Tensor):  # type: ignore[no-untyped-def]
            return self.rotary(*values)

    return lambda: (InLayer(), (meta(2, 4, 6, width), meta(2, 2, 6, width), meta(2, 6, width), meta(2, 6, width)))


class TestRope(PatternContract):
    pattern = Rope()
    positives = {
        "half-split": (example(HalfSplit), 2),
        "wide-head": (example(HalfSplit, width=512), 2),
        "partial": (example(Partial), 1),
        "interleaved": (example(Interleaved), 1),
    }
    near_misses = {name: example(changed(function)) for name, function in NEARLY.items()}

    def test_forms(self) -> None:
        found = {name: self.found(kind)[0][0].constants for name, (kind, _) in self.positives.items()}
        assert found["half-split"] == {"form": "half-split", "partial": False}
        assert found["partial"] == {"form": "half-split", "partial": True}
        assert found["interleaved"]["form"] == "interleaved"
