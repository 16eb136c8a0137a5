"""SwiGLU with two linears and with one merged projection."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.patterns.swiglu import SwiGlu
from shardwright.agents.structure.testkit import PatternContract, meta


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Spelled(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.matmul(x, self.gate_proj.weight.t())
        return self.down_proj(torch.mul(self.up_proj(x), gate * torch.sigmoid(gate)))


class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(64, 192, bias=False), nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class MergedSliced(Merged):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        return self.down(both[..., 96:] * F.silu(both[..., :96]))


class UpFirst(Merged):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Overlapping(Merged):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        return self.down(F.silu(both[..., :96]) * both[..., 95:191])


class TwoInputs(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x + 1.0))


def gated(function):  # type: ignore[no-untyped-def]
    """An MLP whose gate and up go through a function."""

    class Other(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(function(self.gate_proj(x), self.up_proj(x)))

    return Other


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float = 4.0, cap: float = 25.0) -> torch.Tensor:
    wide, other = gate.float(), up.float()
    left = torch.tanh(wide / beta) * beta * torch.sigmoid(wide)
    return (left * (cap * torch.tanh(other / cap))).to(gate.dtype)


def sloped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def sloped_as_published(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    glu = gate * torch.sigmoid(gate * 1.702)
    return (up + 1) * glu


GATED = {
    "gelu": lambda g, u: F.gelu(g) * u,
    "gelu-tanh": lambda g, u: u * F.gelu(g, approximate="tanh"),
    "silu-wide": lambda g, u: (F.silu(g.float()) * u.float()).to(g.dtype),
    "silu-clamped": lambda g, u: F.silu(g.clamp(max=10.0)) * u.clamp(-10.0, 10.0),
    "silu-clamped-after": lambda g, u: F.silu(g).clamp(max=7.0) * u.clamp(-7.0, 7.0),
    "swiglu-sloped": sloped_as_published,
    "situ": situ,
}
NEARLY_GATED = {
    "tanh": lambda g, u: torch.tanh(g) * u,
    "limits-differ": lambda g, u: F.silu(g.clamp(max=10.0)) * u.clamp(-7.0, 7.0),
    "clamped-below-only": lambda g, u: F.silu(g.clamp(min=-10.0)) * u.clamp(-10.0, 10.0),
    "gate-clamped-both": lambda g, u: F.silu(g.clamp(-10.0, 10.0)) * u.clamp(-10.0, 10.0),
    "sloped-in-another-order": sloped,
    "shifted-by-two": lambda g, u: (
        (u.clamp(-7.0, 7.0) + 2) * (g.clamp(max=7.0) * torch.sigmoid(g.clamp(max=7.0) * 1.7))
    ),
    "situ-without-cast": lambda g, u: (torch.tanh(g / 4.0) * 4.0 * torch.sigmoid(g)) * (torch.tanh(u / 25.0) * 25.0),
    "caps-differ": lambda g, u: (
        torch.tanh(g.float() / 4.0) * 5.0 * torch.sigmoid(g.float()) * (torch.tanh(u.float() / 25.0) * 25.0)
    ).to(g.dtype),
    "wide-gate-only": lambda g, u: (F.silu(g.float()) * u).to(g.dtype),
}


class GateUsedElsewhere(Mlp):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        gate = self.gate_proj(x)
        return self.down_proj(self.act(gate) * self.up_proj(x)), gate.sum()


class Dropped(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.dropout(self.act(self.gate_proj(x)), 0.1) * self.up_proj(x))


class Widened(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x).float()).to(x.dtype) * self.up_proj(x))


class GateChanged(Mlp):
    """silu overwrites the gate in place; the gate is read again as a value of the region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        act = self.act(gate)
        act.mul_(2.0)
        return self.down_proj(act * self.up_proj(x))


def example(kind: type[nn.Module]):  # type: ignore[no-untyped-def]
    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = kind()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x)

    return lambda: (InLayer(), (meta(2, 6, 64),))


def hooked() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layer, tensors = example(Mlp)()
    layer.mlp.act.register_forward_hook(lambda module, args, output: None)
    return layer, tensors


class TestSwiGlu(PatternContract):
    pattern = SwiGlu()
    positives = {
        "split": (example(Mlp), 1),
        "spelled": (example(Spelled), 1),
        "merged": (example(Merged), 1),
        "merged-sliced": (example(MergedSliced), 1),
        **{name: (example(gated(function)), 1) for name, function in GATED.items()},
    }
    near_misses = {
        "up-first": example(UpFirst),
        "overlapping": example(Overlapping),
        "two-inputs": example(TwoInputs),
        **{name: example(gated(function)) for name, function in NEARLY_GATED.items()},
        "gate-used-elsewhere": example(GateUsedElsewhere),
        "dropout": example(Dropped),
        "widened": example(Widened),
        "gate-changed": example(GateChanged),
        "hooked": hooked,
    }

    def test_gate_and_up_are_bound_by_what_they_do(self) -> None:
        for kind in (Mlp, Spelled):
            match, _ = self.found(example(kind))[0]
            assert match.parameters["gate"].endswith("gate_proj.weight")
            assert match.parameters["up"].endswith("up_proj.weight")

    def test_the_form_of_the_gate_is_bound(self) -> None:
        for name, function in GATED.items():
            ((match, _),) = self.found(example(gated(function)))
            assert match.constants["gate"] == name
        ((match, _),) = self.found(example(gated(situ)))
        assert (match.constants["beta"], match.constants["lambda"]) == (4.0, 25.0)
