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


class Gelu(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


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
    }
    near_misses = {
        "up-first": example(UpFirst),
        "overlapping": example(Overlapping),
        "two-inputs": example(TwoInputs),
        "gelu": example(Gelu),
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
