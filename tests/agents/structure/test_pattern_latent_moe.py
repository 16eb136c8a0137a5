"""Experts in a latent width with a norm in each of its three places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwright.agents.structure.patterns.latent_moe import LatentMoe
from shardwright.agents.structure.testkit import Example, PatternContract, meta
from shardwright.checkpoints.models.kimi_k3.norms import RMSNorm


class Experts(nn.Module):
    """One node of a capture; the weight of a norm of each result may lie beside the stacks."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 64, 48))
        self.down_proj = nn.Parameter(torch.empty(4, 48, 32))
        self.norm = RMSNorm(48, 1e-6) if each else None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        gate, up = torch.einsum("th,eih->tei", hidden_states, self.gate_up_proj).chunk(2, dim=-1)
        each = torch.einsum("tei,ehi->teh", torch.sigmoid(gate) * up, self.down_proj)
        each = each if self.norm is None else self.norm(each)
        chosen = each.gather(1, top_k_index.unsqueeze(-1).expand(-1, -1, each.shape[-1]))
        return (chosen * top_k_weights.unsqueeze(-1)).sum(1)


class Block(nn.Module):
    def __init__(self, before: bool = False, after: bool = False, each: bool = False) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(64, 4, bias=False), Experts(each)
        self.down, self.up = nn.Linear(64, 48, bias=False), nn.Linear(48, 64, bias=False)
        self.before = RMSNorm(48, 1e-6) if before else nn.Identity()
        self.after = RMSNorm(48, 1e-5) if after else nn.Identity()

    def choice(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = torch.topk(torch.softmax(self.gate(x), dim=-1), 2, dim=-1)
        return ids, weights

    def forward(self, x: torch.Tensor) -> Any:
        return self.up(self.after(self.experts(self.before(self.down(x)), *self.choice(x))))


class LatentUsed(Block):
    """The sum of the experts' results is read before its norm too: the second read is outside the region."""

    def forward(self, x: torch.Tensor) -> Any:
        low = self.down(x)
        y = self.up(self.after(self.experts(self.before(low), *self.choice(x))))
        return y, low.sum()


class WideUp(Block):
    """Not back to the width that it came from."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 96, bias=False)


class AtFullWidth(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(48, 48, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.experts(x[:, :48], *self.choice(x))


class Scaled(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return self.up(self.after(2.5 * self.experts(self.before(self.down(x)), *self.choice(x))))


class WrittenBetween(Block):
    """The tokens change after the projection has read them."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x + 1.0
        low = self.down(x)
        x.mul_(2.0)
        return self.up(self.experts(low, *self.choice(x)))


def inside(kind: type[Block], **norms: bool) -> Example:
    class InLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = kind(**norms)

        def forward(self, x: torch.Tensor) -> Any:
            return self.mlp(x)

    return lambda: (InLayer(), (meta(12, 64),))


PLACES = {"none": (), "before": ("before",), "after": ("after",), "each": ("each",), "all": ("before", "after", "each")}


class TestLatentMoe(PatternContract):
    pattern = LatentMoe()
    positives = {
        "all": (inside(Block, before=True, after=True, each=True), 1),
        **{name: (inside(Block, **dict.fromkeys(places, True)), 1) for name, places in PLACES.items()},
    }
    near_misses = {
        "latent-used-elsewhere": inside(LatentUsed, before=True),
        "wide-up": inside(WideUp),
        "at-full-width": inside(AtFullWidth),
        "scaled-between": inside(Scaled),
        "written-between": inside(WrittenBetween),
    }

    @pytest.mark.parametrize("name", PLACES)
    def test_the_three_norm_positions_are_told_apart(self, name: str) -> None:
        ((match, _),) = self.found(self.positives[name][0])
        assert {place for place in ("before", "after", "each") if match.constants[place]} == set(PLACES[name])
        if "after" in PLACES[name]:
            assert match.constants["after_eps"] == 1e-5 and match.roles["after_norm"] == "after"
