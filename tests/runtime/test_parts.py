"""Schedule, first values, adapters on dense weights, checkpointing that keeps its routing, fused forwards, digests."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwright.kernels.registry import OPERATORS, OperatorEntry, source_sha256
from shardwright.runtime.checkpointing import checkpoint_layers
from shardwright.runtime.checks.compare import equal_numbers, require
from shardwright.runtime.checks.step import adapters_moved, base_unchanged, digest
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.fuse import fusions_off, install_fusions
from shardwright.runtime.lora.init import initial_box, kaiming_a
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.runtime.optimizer import learning_rate
from shardwright.schemas.errors import CheckFailed, LegalityError, StalePlanError
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.recipe import ScheduleSpec


def test_schedules_have_their_known_values() -> None:
    linear = ScheduleSpec(steps=11, warmup_steps=2, decay="linear", final_fraction="0")
    assert [learning_rate(step, 1.0, linear) for step in (1, 2, 3, 7, 11)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    cosine = ScheduleSpec(steps=5, decay="cosine", final_fraction="0.1")
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    assert [learning_rate(step, 1.0, cosine) for step in range(1, 6)] == pytest.approx(expected)
    assert learning_rate(4, 3.0, ScheduleSpec(steps=5, decay="constant")) == 3.0
    assert learning_rate(1, 3.0, ScheduleSpec(steps=1)) == 3.0


@given(rows=st.integers(0, 3), columns=st.integers(0, 5), experts=st.integers(0, 2), seed=st.integers(0, 3))
def test_any_slice_of_a_first_value_is_that_slice_of_the_whole(
    rows: int, columns: int, experts: int, seed: int
) -> None:
    """Every mesh gets the same adapters."""
    shape = (3, 4, 6)
    whole = initial_box(seed, "x_lora_a", shape, ((0, 3), (0, 4), (0, 6)))
    box = ((experts, 3), (rows, 4), (columns, 6))
    part = initial_box(seed, "x_lora_a", shape, box)
    assert torch.equal(part, whole[experts:, rows:, columns:])
    assert not torch.equal(whole[0], whole[1])
    assert whole.abs().max() <= 1 / math.sqrt(6)
    assert not initial_box(seed, "x_lora_b", shape, box).any()


def test_first_values_have_pefts_distribution() -> None:
    """Kaiming-uniform with a = √5 is uniform in ±1/√in: variance 1/(3·in)."""
    value = kaiming_a(0, "name", (64, 400))
    reference = nn.init.kaiming_uniform_(torch.empty(64, 400), a=math.sqrt(5))
    assert value.var().item() == pytest.approx(1 / 1200, rel=0.05) == pytest.approx(reference.var().item(), rel=0.05)


def test_lora_linear_equals_its_formula() -> None:
    torch.manual_seed(0)
    original = nn.Linear(6, 5).double().requires_grad_(False)
    ours = LoraLinear(original, 2, 0.5, 0.0, torch.float64)
    nn.init.normal_(ours.lora_a)
    nn.init.normal_(ours.lora_b)
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    merged = original.weight + 0.5 * ours.lora_b @ ours.lora_a
    expected = x @ merged.T + original.bias
    torch.testing.assert_close(ours(x), expected)
    leaves = [x, ours.lora_a, ours.lora_b]
    ours_grads = torch.autograd.grad(ours(x).square().sum(), leaves)
    for mine, plain in zip(ours_grads, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        torch.testing.assert_close(mine, plain)
    assert {name for name, value in ours.named_parameters() if value.requires_grad} == {"lora_a", "lora_b"}


class NoisyRouter(nn.Module):
    """A layer whose routing would differ in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 8)
        self.experts = nn.Parameter(torch.randn(8, 4))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.score(x).softmax(-1)
        noise = torch.rand(scores.shape, generator=NOISE)
        value, index = torch.topk(scores + noise.to(scores), 2, dim=-1)
        value /= value.sum(-1, keepdim=True)
        self.seen.append(index)
        return x + (self.experts[index] * value.unsqueeze(-1)).sum(-2)


NOISE = torch.Generator().manual_seed(0)


def test_recomputation_keeps_the_routing() -> None:
    """C9, D21: a router that would choose otherwise is held to its first choice; the gradient is the forward's own."""
    torch.manual_seed(1)
    layer = NoisyRouter()
    checkpoint_layers([layer], LoadMeter())
    x = torch.randn(16, 4, requires_grad=True)
    layer(x).square().sum().backward()
    assert len(layer.seen) == 2 and torch.equal(layer.seen[0], layer.seen[1])
    with torch.no_grad():
        layer(x)
        layer(x)
    assert not torch.equal(layer.seen[2], layer.seen[3])


def test_checkpointed_gradients_equal_plain_ones() -> None:
    torch.manual_seed(2)
    layer = NoisyRouter()
    x = torch.randn(16, 4, requires_grad=True)
    NOISE.manual_seed(7)
    layer(x).square().sum().backward()
    plain = [x.grad, layer.score.weight.grad, layer.experts.grad]
    x.grad = layer.score.weight.grad = layer.experts.grad = None
    checkpoint_layers([layer], LoadMeter())
    original = torch.rand
    NOISE.manual_seed(7)
    noise = original(16, 8, generator=NOISE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *args, **kwargs: noise)
        layer(x).square().sum().backward()
    for ours, theirs in zip([x.grad, layer.score.weight.grad, layer.experts.grad], plain, strict=True):
        torch.testing.assert_close(ours, theirs)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, None]:
        return self.proj(hidden_states) * scale, None


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self_attn = Attention(width)
        self.mlp = nn.Linear(width, width)
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), scale=scale)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def fusion(op: str, modules: tuple[str, ...], roles: dict[str, str], **changes: Any) -> FusionDecision:
    fields: dict[str, Any] = {
        "proposal_id": f"{op}.here".lstrip("-."),
        "pattern": op.replace("-", "none"),
        "variant": "kernel",
        "provider": "shardwright",
        "op": op,
        "modules": modules,
        "roles": roles,
        "constants": {"eps": "0.00001"},
        "source_sha256": source_sha256(op) if op in OPERATORS else None,
        "tolerance": "0.001",
    }
    return FusionDecision.model_validate({**fields, **changes})


@pytest.fixture
def plain_operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators' mathematics in torch, and a note of each call."""
    calls: list[str] = []

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        calls.append("rms_norm")
        return nn.functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append("add_rms_norm")
        total = x + residual
        return nn.functional.rms_norm(total, weight.shape, weight, eps), total

    table = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}
    monkeypatch.setattr(OperatorEntry, "load_op", lambda entry: table[entry.name])
    return calls


PRE_NORM = {
    "first_norm": "input_layernorm",
    "branch": "self_attn",
    "norm": "post_attention_layernorm",
    "mlp": "mlp",
}


def test_fused_forwards_keep_names_and_have_a_switch(plain_operators: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": Layer(8), "norm": Norm(8)})
    names = [name for name, _ in model.named_parameters()]
    x = torch.randn(2, 3, 8)

    def run() -> torch.Tensor:
        return model["norm"](model["layer"](x, scale=0.5))

    before = run()
    decisions = (
        fusion("rms_norm", ("norm", "layer.input_layernorm"), {"weight": "weight"}),
        fusion("add_rms_norm", ("layer",), PRE_NORM),
        fusion("rms_norm", ("layer.post_attention_layernorm",), {"weight": "weight"}, rejected=True),
        fusion("-", ("layer.mlp",), {}, provider="eager"),
    )
    switches = install_fusions(model, decisions)
    assert [switch.name for switch in switches] == ["norm", "layer.input_layernorm", "layer"]
    torch.testing.assert_close(run(), before)
    assert plain_operators == ["rms_norm", "add_rms_norm", "rms_norm"]
    with fusions_off(switches):
        assert torch.equal(run(), before)
    assert len(plain_operators) == 3 and all(switch.fused for switch in switches)
    assert [name for name, _ in model.named_parameters()] == names


def test_fusions_that_do_not_fit_are_refused() -> None:
    model = nn.ModuleDict({"layer": Layer(8), "norm": Norm(8)})
    model["layer"].extra = Norm(8)
    for roles in (PRE_NORM, {"norm": "post_attention_layernorm"}):
        with pytest.raises(LegalityError, match="fusion-layer"):
            install_fusions(model, (fusion("add_rms_norm", ("layer",), roles),))
    with pytest.raises(LegalityError, match="fusion-module"):
        install_fusions(model, (fusion("rms_norm", ("nowhere",), {}),))
    with pytest.raises(LegalityError, match="fusion-provider"):
        install_fusions(model, (fusion("swiglu", ("norm",), {}),))
    with pytest.raises(StalePlanError, match="kernel-source"):
        install_fusions(model, (fusion("rms_norm", ("norm",), {}, source_sha256="0" * 64),))


@given(st.integers(0, 30), st.integers(0, 30))
def test_digest_sees_one_bit_and_an_exchange(place: int, other: int) -> None:
    value = torch.arange(31, dtype=torch.float32)
    changed = value.clone()
    changed.view(torch.int32)[place] ^= 1
    assert digest(changed) != digest(value)
    swapped = value.clone()
    swapped[place], swapped[other] = value[other], value[place]
    assert (digest(swapped) == digest(value)) == (place == other)


def test_step_checks_see_what_they_are_for() -> None:
    before = {"experts.up_lora_b": torch.zeros(2, 3, 1)}

    def now(values: torch.Tensor) -> dict[str, Any]:
        owned = SimpleNamespace(local=lambda: values, expert=True, numbers=(2, 3))
        return {"experts.up_lora_b": owned}

    loads = {"experts": torch.tensor([9, 9, 5, 0])}
    right = torch.zeros(2, 3, 1)
    right[0] = 1
    assert adapters_moved(before, now(right), loads).passed
    still = adapters_moved(before, now(torch.zeros(2, 3, 1)), loads)
    assert not still.passed and "expert 2 did not move though it got tokens" in still.evidence
    everywhere = adapters_moved(before, now(torch.ones(2, 3, 1)), loads)
    assert not everywhere.passed and "expert 3 moved without a token" in everywhere.evidence
    assert base_unchanged({"w": (1, 2)}, {"w": (1, 2)}).passed
    assert not base_unchanged({"w": (1, 2)}, {"w": (1, 3)}).passed
    assert not equal_numbers("step", "x", float("nan"), 1.0, 1.0, "x").passed
    with pytest.raises(CheckFailed, match=r"1\.1 against 1,"):
        require([equal_numbers("step", "x", 1.1, 1.0, 0.01, "x")], "here")
