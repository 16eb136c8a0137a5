"""Activations that stand alone: seen as facts, with their constants."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.patterns.activation import Activation
from shardwright.agents.structure.testkit import Example, PatternContract, meta

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float = 4.0, cap: float = 25.0) -> torch.Tensor:
    wide, other = gate.float(), up.float()
    left = torch.tanh(wide / beta) * beta * torch.sigmoid(wide)
    return (left * (torch.tanh(other / cap) * cap)).to(gate.dtype)


def sloped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


class Stage(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.__dict__["function"] = function

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.__dict__["function"](gate, up)
        return value


def alone(function: Function) -> Example:
    """The operands come from outside: two values, neither a linear's."""

    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = Stage(function)

        def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return self.act(gate, up)

    return lambda: (InLayer(), (meta(2, 6, 96), meta(2, 6, 96)))


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.square(F.relu(self.up_proj(x))))


class Gated(Squared):
    """A whole MLP: the gated pattern has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(64, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x)))


def of_mlp(kind: type[nn.Module]) -> Example:
    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = kind()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x)

    return lambda: (InLayer(), (meta(2, 6, 64),))


ALONE: dict[str, Function] = {
    "situ": situ,
    "swiglu-sloped": sloped,
    "silu-clamped": lambda g, u: F.silu(g.clamp(max=10.0)) * u.clamp(-10.0, 10.0),
    "silu-clamped-after": lambda g, u: F.silu(g).clamp(max=7.0) * u.clamp(-7.0, 7.0),
}


class TestActivation(PatternContract):
    pattern = Activation()
    positives = {
        **{name: (alone(function), 1) for name, function in ALONE.items()},
        "relu2": (of_mlp(Squared), 1),
        "relu": (alone(lambda g, u: F.relu(g) + u), 1),
    }
    near_misses = {
        "a-whole-mlp": of_mlp(Gated),
        "cubed": alone(lambda g, u: F.relu(g).pow(3) * u.tanh()),
        "caps-differ": alone(
            lambda g, u: (torch.tanh(g.float() / 4.0) * 5.0 * torch.sigmoid(g.float())).to(g.dtype) * u
        ),
        "limits-differ": alone(lambda g, u: F.silu(g.clamp(max=10.0)) * u.clamp(-7.0, 7.0)),
    }

    def near(self, name: str) -> list[str]:
        return [match.constants["gate"] for match, _ in self.found(self.near_misses[name])]

    def test_near_misses_are_refused(self) -> None:
        """A power of a ReLU still shows its ReLU; no near miss shows a form that it is not."""
        assert {name: self.near(name) for name in self.near_misses} == {
            "a-whole-mlp": [],
            "cubed": ["relu"],
            "caps-differ": [],
            "limits-differ": [],
        }

    def test_constants_are_facts(self) -> None:
        seen = {name: self.found(example)[0][0].constants for name, (example, _) in self.positives.items()}
        assert {name: c["gate"] for name, c in seen.items()} == {name: name for name in self.positives}
        assert (seen["situ"]["beta"], seen["situ"]["lambda"]) == (4.0, 25.0)
        assert (seen["swiglu-sloped"]["limit"], seen["swiglu-sloped"]["alpha"]) == (7.0, 1.702)
