"""The shared expert beside routed ones: merged and split, gated and plain, and what only looks like one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.patterns.shared_expert import SharedExpert
from shardwright.agents.structure.testkit import Example, PatternContract, meta


class Experts(nn.Module):
    """Two stacks, so that a capture sees one node."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 64, 64))
        self.down_proj = nn.Parameter(torch.empty(4, 64, 32))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        gate, up = torch.einsum("th,eih->tei", hidden_states, self.gate_up_proj).chunk(2, dim=-1)
        each = torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.down_proj)
        chosen = each.gather(1, top_k_index.unsqueeze(-1).expand(-1, -1, each.shape[-1]))
        return (chosen * top_k_weights.unsqueeze(-1)).sum(1)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
        self.down_proj = nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MergedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(64, 64, bias=False), nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.input(x).chunk(2, dim=-1)
        return self.output(F.silu(gate) * up)


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.square(F.relu(self.up(x))))


class Block(nn.Module):
    shared_kind: type[nn.Module] = Mlp

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(64, 4, bias=False), Experts()
        self.shared = self.shared_kind()
        self.opening = nn.Linear(64, 1, bias=False)

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 64)
        weights, ids = torch.topk(torch.softmax(self.gate(flat), dim=-1), 2, dim=-1)
        return self.experts(flat, ids, weights).view_as(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.routed(x) + self.shared(x)


class Merged(Block):
    shared_kind = MergedMlp


class Relu2(Block):
    shared_kind = Squared


class Opened(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.routed(x) + torch.sigmoid(self.opening(x)) * self.shared(x)


class OtherTokens(Block):
    """The dense MLP reads something that the experts do not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.routed(x + 1.0) + self.shared(x * 2.0)


class OpenedByOther(Block):
    """The gate looks at other values than the expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.routed(x) + torch.sigmoid(self.opening(x + 1.0)) * self.shared(x)


class TwoInputs(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mlp = self.shared
        return self.routed(x) + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x + 1.0))


class InnerUsed(Block):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        shared = self.shared(x)
        return self.routed(x) + shared, shared.sum()


class Dropped(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.routed(x) + F.dropout(self.shared(x), 0.1)


class Scaled(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.routed(x) + self.shared(x) * 0.5


class NoRouted(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shared(x)


def inside(kind: type[nn.Module]) -> Example:
    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = kind()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x)

    return lambda: (InLayer(), (meta(2, 6, 64),))


class TestSharedExpert(PatternContract):
    pattern = SharedExpert()
    positives = {
        "split": (inside(Block), 1),
        "merged": (inside(Merged), 1),
        "no-gate": (inside(Relu2), 1),
        "opened": (inside(Opened), 1),
    }
    near_misses = {
        "other-tokens": inside(OtherTokens),
        "opened-by-other": inside(OpenedByOther),
        "two-inputs": inside(TwoInputs),
        "inner-used": inside(InnerUsed),
        "dropout": inside(Dropped),
        "scaled": inside(Scaled),
        "no-routed-experts": inside(NoRouted),
    }

    def test_forms_are_bound(self) -> None:
        seen = {name: self.found(example)[0][0] for name, (example, _) in self.positives.items()}
        assert {name: (m.constants["form"], m.constants["gated"]) for name, m in seen.items()} == {
            "split": ("split", False),
            "merged": ("merged", False),
            "no-gate": ("plain", False),
            "opened": ("split", True),
        }
        assert seen["opened"].roles["opening"] == "opening" and seen["split"].roles["down"] == "shared.down_proj"
