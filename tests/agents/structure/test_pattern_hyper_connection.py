"""Hyper-connections of the families that have them, and near misses of one."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.agents.structure.patterns.hyper_connection import HyperConnection
from shardwright.agents.structure.testkit import Example, PatternContract, meta

N, H = 4, 64
CLASSES = {"deepseek_v4": "DeepseekV4HyperConnection", "glm5_next": "Glm5NextTextHyperConnection"}


def family(name: str, steps: int) -> nn.Module:
    spelled = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    sizes = {"hc_mult": N, "hc_sinkhorn_iters": steps, "hc_eps": 1e-6}
    made: nn.Module = getattr(spelled, CLASSES[name])(SimpleNamespace(**sizes, rms_norm_eps=1e-5, hidden_size=H))
    return made


class Half(nn.Module):
    """A layer's half as DeepSeek-V4 spells it, without attention."""

    def __init__(self, connection: nn.Module) -> None:
        super().__init__()
        self.hc = connection

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        post, comb, read = self.hc(streams)
        mixed = torch.matmul(comb.to(streams.dtype).transpose(-1, -2), streams)
        return post.to(streams.dtype).unsqueeze(-1) * read.unsqueeze(-2) + mixed


class Spelled(nn.Module):
    """The module's arithmetic with the places where a near miss differs."""

    first, between, squashed, factor, small = -2, (-1, -2), torch.sigmoid, 2, 1e-6

    def __init__(self) -> None:
        super().__init__()
        M = 2 * N + N * N
        self.fn, self.base = nn.Parameter(torch.empty(M, N * H)), nn.Parameter(torch.empty(M))
        self.scale = nn.Parameter(torch.empty(3))

    def forward(self, streams: torch.Tensor) -> Any:
        wide = streams.view(*streams.shape[:2], -1).float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        pre, post, comb = nn.functional.linear(wide, self.fn.float()).split([N, N, N * N], dim=-1)
        pre_b, post_b, comb_b = self.base.split([N, N, N * N])
        scales = self.scale.unbind(0)
        pre = type(self).squashed(pre * scales[0] + pre_b) + 1e-6
        post = self.factor * torch.sigmoid(post * scales[1] + post_b)
        comb = torch.softmax(comb.view(*comb.shape[:-1], N, N) * scales[2] + comb_b.view(N, N), dim=-1) + self.small
        comb = comb / (comb.sum(dim=self.first, keepdim=True) + 1e-6)
        for dim in self.between:
            comb = comb / (comb.sum(dim=dim, keepdim=True) + 1e-6)
        return self.results(pre, post, comb, (pre.unsqueeze(-1) * streams).sum(dim=2).to(streams.dtype))

    def results(self, pre: torch.Tensor, *found: torch.Tensor) -> Any:
        return found


class RowsFirst(Spelled):
    first, between = -1, (-2, -1)


class ColumnsTwice(Spelled):
    between = (-2, -2)


class OtherSquash(Spelled):
    squashed = torch.tanh


class OtherSmall(Spelled):
    small = 1e-3


class PreToo(Spelled):
    """What the module uses inside goes out as well."""

    def results(self, pre: torch.Tensor, *found: torch.Tensor) -> Any:
        return found[0] + pre, *found[1:]


def half(made: Any) -> Example:
    return lambda: (Half(made()), (meta(2, 6, N, H),))


class TestHyperConnection(PatternContract):
    pattern = HyperConnection()
    positives = {
        "spelled": (half(Spelled), 1),
        "deepseek_v4": (half(lambda: family("deepseek_v4", 20)), 1),
        "glm5_next": (half(lambda: family("glm5_next", 3)), 1),
    }
    near_misses = {
        "rows-first": half(RowsFirst),
        "columns-twice": half(ColumnsTwice),
        "tanh": half(OtherSquash),
        "two-small-numbers": half(OtherSmall),
        "weights-read-elsewhere": half(PreToo),
    }

    def test_constants_and_leaves_are_bound(self) -> None:
        ((match, _),) = self.found(self.positives["deepseek_v4"][0])
        assert match.constants == {"eps": 1e-5, "hc_eps": 1e-6, "steps": 20, "post": 2, "streams": N}
        assert match.roles == {"fn": "fn", "base": "base", "scale": "scale"} and match.anchor == "layer.hc"
        assert self.pattern.cost_shape(match, 24) == {"T": 24, "N": N, "H": H, "S": 20}

    @pytest.mark.parametrize("name", ["spelled", "deepseek_v4"])
    def test_workers_may_compile_the_module(self, name: str) -> None:
        ((match, _),) = self.found(self.positives[name][0])
        compiled, eager = self.pattern.variants()
        assert compiled.provider == "compile" and not compiled.not_installable
        assert self.pattern.refuses(match, compiled) == "" == self.pattern.refuses(match, eager)
