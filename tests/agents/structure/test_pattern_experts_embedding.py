"""Experts in embedding tables, on the class that transformers ships and on changed copies of its arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.doge.configuration_doge import DogeConfig
from transformers.models.doge.modeling_doge import DogeCDMoE

from shardwright.agents.structure.interpret import Fp64Region
from shardwright.agents.structure.patterns.experts_embedding import NO_OPERATOR, ExpertsEmbedding
from shardwright.agents.structure.testkit import PatternContract, meta

HIDDEN, EXPERTS, TOP = 48, 16, 3
Example = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


class Tables(nn.Module):
    """Neurons in two tables; methods are what copies change."""

    def __init__(self, hidden: int = HIDDEN, experts: int = EXPERTS) -> None:
        super().__init__()
        self.down_embed = nn.Embedding(experts, hidden)
        self.up_embed = nn.Embedding(experts, hidden)

    def gated(self, dots: Tensor, weights: Tensor) -> Tensor:
        return F.silu(dots) * weights

    def upper(self, ids: Tensor) -> Tensor:
        return self.up_embed(ids)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tokens = ids.shape[0]
        down, up = self.down_embed(ids), self.upper(ids)
        dots = torch.matmul(down, x.view(tokens, -1, 1)).view(tokens, -1)
        return torch.matmul(self.gated(dots, weights).view(tokens, 1, -1), up).view(x.shape)


class Gelu(Tables):
    def gated(self, dots: Tensor, weights: Tensor) -> Tensor:
        return F.gelu(dots) * weights


class Tanh(Tables):
    """A gate that no form describes."""

    def gated(self, dots: Tensor, weights: Tensor) -> Tensor:
        return torch.tanh(dots) * weights


class WeighsFirst(Tables):
    """The weight inside the activation."""

    def gated(self, dots: Tensor, weights: Tensor) -> Tensor:
        return F.silu(dots * weights)


class Clamped(Tables):
    """Linear in no weight: an expert named twice would not have the sum of its weights."""

    def gated(self, dots: Tensor, weights: Tensor) -> Tensor:
        return F.silu(dots.clamp(max=3.0)) * weights.clamp(min=-3.0, max=3.0)


class OtherNumbers(Tables):
    """The tables are looked up by different numbers."""

    def upper(self, ids: Tensor) -> Tensor:
        return self.up_embed(ids.flip(-1))


class OneTable(Tables):
    """One table for both products."""

    def upper(self, ids: Tensor) -> Tensor:
        return self.down_embed(ids)


class Padded(Tables):
    """A row that never learns: the same values, other gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up_embed = nn.Embedding(EXPERTS, HIDDEN, padding_idx=3)


class Shown(Tables):
    """The products are read from outside too."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        dots = torch.matmul(self.down_embed(ids), x.view(ids.shape[0], -1, 1)).view(ids.shape[0], -1)
        inner = self.gated(dots, weights).view(ids.shape[0], 1, -1)
        return torch.matmul(inner, self.up_embed(ids)).view(x.shape), dots


class Dropped(Tables):
    """Random numbers between the products."""

    def gated(self, dots: Tensor, weights: Tensor) -> Tensor:
        return F.dropout(F.silu(dots), 0.1, self.training) * weights


def of(kind: type[nn.Module], *shape: int) -> Example:
    shape = shape or (2, 12, HIDDEN)
    return lambda: (kind(), (meta(*shape), meta(24, TOP, dtype=torch.long), meta(24, TOP)))


def doge_config(**changes: int) -> DogeConfig:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_experts": EXPERTS, "num_experts_per_tok": TOP}
    return DogeConfig(**{**sizes, **changes}, is_moe=True)


def doge() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return DogeCDMoE(doge_config()), (meta(2, 12, HIDDEN),)


def large_doge() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return DogeCDMoE(doge_config(hidden_size=768, num_experts=1024, num_experts_per_tok=8)), (meta(2, 12, 768),)


def hooked() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layer, tensors = doge()
    layer.get_submodule("up_embed").register_forward_hook(lambda module, args, output: None)
    return layer, tensors


class TestExpertsEmbedding(PatternContract):
    pattern = ExpertsEmbedding()
    positives = {
        "doge": (doge, 1),
        "doge, large": (large_doge, 1),
        "gelu": (of(Gelu), 1),
        "flat": (of(Tables, 24, HIDDEN), 1),
    }
    near_misses = {
        "tanh": of(Tanh),
        "weighs-first": of(WeighsFirst),
        "clamped": of(Clamped),
        "other-numbers": of(OtherNumbers),
        "one-table": of(OneTable),
        "padded": of(Padded),
        "shown": of(Shown),
        "dropped": of(Dropped),
        "hooked": hooked,
    }

    def test_near_misses_that_match_are_refused_for_their_own_reason(self) -> None:
        for name, reason in {"padded": "re-trace", "shown": "no-escaping-value", "hooked": "hooks"}.items():
            ((_, certificate),) = self.found(self.near_misses[name])
            assert reason in certificate.refused_because(), name
        for name in ("tanh", "weighs-first", "clamped", "other-numbers", "one-table", "dropped"):
            assert self.found(self.near_misses[name]) == [], name

    def test_what_is_bound(self) -> None:
        ((match, _),) = self.found(doge)
        assert match.roles == {"down": "down_embed", "up": "up_embed"}
        assert match.constants["gate"] == "silu" and match.anchor == "layer"
        assert match.pattern.cost_shape(match, 100) == {"T": 100, "K": TOP, "H": HIDDEN, "E": EXPERTS}

    def test_nothing_but_the_module_runs_it(self) -> None:
        reasons = {spec.provider: spec.not_installable for spec in self.pattern.variants()}
        assert set(reasons) == {"compile", "eager"} and not reasons["eager"]
        assert reasons["compile"].startswith(NO_OPERATOR)

    def test_the_region_gives_what_the_class_gives(self) -> None:
        """Captured nodes on the class's own choice, beside its shared MLP, against the class itself in fp64."""
        ((match, _),) = self.found(doge)
        generator = torch.Generator().manual_seed(3)
        module = DogeCDMoE(doge_config()).double()
        for value in module.parameters():
            value.data = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        x = torch.randn(2, 12, HIDDEN, generator=generator, dtype=torch.float64)
        whole, logits = module(x)
        (first, second), (rows, columns) = logits.topk(module.num_keys, dim=-1)
        scores = (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(-2)
        numbers = (rows.unsqueeze(-1) * module.num_keys + columns.unsqueeze(-2)).flatten(-2)
        best = scores.topk(TOP, dim=-1)
        values = {"x": x, "ids": numbers.gather(-1, best.indices), "weights": best.values.softmax(-1)}
        values |= {role: module.get_parameter(f"{name}.weight") for role, name in match.roles.items()}
        seen = Fp64Region(match.region, self.pattern.sizes(match))(values)["y"]
        shared = module.down_proj(F.silu(module.gate_proj(x)) * module.up_proj(x))
        torch.testing.assert_close(seen, whole - shared, rtol=1e-10, atol=1e-8)
