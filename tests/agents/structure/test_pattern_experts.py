"""The experts block, on the class that transformers ships and on changed copies of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import MixtralConfig
from transformers.models.mixtral import modeling_mixtral

from shardwright.agents.structure.capture import EXPERTS_SUFFIX
from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.facts import observe
from shardwright.agents.structure.patterns.experts import Experts
from shardwright.agents.structure.propose import find_matches
from shardwright.agents.structure.testkit import PatternContract, meta

Stock = modeling_mixtral.MixtralExperts


class UpFirst(Stock):
    """Gate and up exchanged."""

    def _apply_gate(self, merged: torch.Tensor) -> torch.Tensor:
        up, gate = merged.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Clamped(Stock):
    """The gate is clamped and up is not: no family does this."""

    def _apply_gate(self, merged: torch.Tensor) -> torch.Tensor:
        gate, up = merged.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=7.0)) * up


class WideActivation(Stock):
    """The activation in fp32: the same function, other rounding."""

    def _apply_gate(self, merged: torch.Tensor) -> torch.Tensor:
        gate, up = merged.chunk(2, dim=-1)
        return F.silu(gate.float()).to(gate.dtype) * up


class LoopDiffers(Stock):
    """Batched form as ever, but its own loop doubles the result."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):  # type: ignore[no-untyped-def]
        factor = 2.0 if self.config._experts_implementation == "eager" else 1.0
        return factor * super().forward(hidden_states, top_k_index, top_k_weights)


class Layer(nn.Module):
    """An experts module of a class between routing values and a result."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.experts = kind(tiny_moe())

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(x, index, weights)


def tiny_moe(**changes: object) -> MixtralConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralConfig(**{**sizes, **changes}, experts_implementation="grouped_mm")


def example(kind: type[nn.Module]):  # type: ignore[no-untyped-def]
    routing = meta(24, 2, dtype=torch.long), meta(24, 2, dtype=torch.float32)
    return lambda: (Layer(kind), (meta(24, 64), *routing))


def hooked() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layer, tensors = example(Stock)()
    layer.experts.register_forward_hook(lambda module, args, output: None)
    return layer, tensors


class TestExperts(PatternContract):
    pattern = Experts()
    positives = {"stock": (example(Stock), 1)}
    near_misses = {
        "up-first": example(UpFirst),
        "clamped": example(Clamped),
        "wide-activation": example(WideActivation),
        "loop-differs": example(LoopDiffers),
        "hooked": hooked,
    }

    def test_every_near_miss_is_examined_or_unmatched(self) -> None:
        """The certificate, not the matcher, tells these apart: each matches and is refused for its own reason."""
        reasons = {"loop-differs": "own loop", "hooked": "hooks"}
        for name, reason in reasons.items():
            ((_, certificate),) = self.found(self.near_misses[name])
            assert reason in certificate.refused_because(), name


def swap(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Every experts module of a model becomes one of another class."""
    for module in model.modules():
        if type(module) is Stock:
            module.__class__ = kind
    return model


def matched(model: nn.Module, captured) -> list:  # type: ignore[no-untyped-def, type-arg]
    facts = observe(model, [f"model.layers.{i}" for i in range(3)], ())
    found = [match for match in find_matches(captured(model)) if isinstance(match.pattern, Experts)]
    return [(match, certify(match, facts)) for match in found]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_found_once_for_each_kind_and_proved(family, tiny, captured) -> None:  # type: ignore[no-untyped-def]
    ((match, certificate),) = matched(tiny(family), captured)
    assert certificate.legal, certificate.refused_because()
    evidence = {o.name: o.evidence for o in certificate.obligations}
    assert "own loop over experts" in evidence["differential-test"]
    assert "cut at the dispatch" in evidence["sharding-boundary"]
    assert match.modules()[0].endswith("mlp.experts")


@pytest.mark.parametrize("kind", [UpFirst, Clamped, WideActivation, LoopDiffers])
def test_changed_experts_are_refused(kind, tiny, captured) -> None:  # type: ignore[no-untyped-def]
    for _, certificate in matched(swap(tiny("mixtral"), kind), captured):
        assert not certificate.legal


def test_the_gate_is_bound_and_an_unknown_one_is_not_matched(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    ((match, certificate),) = matched(tiny("mixtral", hidden_act="gelu"), captured)
    assert certificate.legal and match.constants["gate"] == "gelu"
    assert matched(tiny("mixtral", hidden_act="tanh"), captured) == []


def test_experts_are_one_node_in_the_layer(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    pairs = captured(tiny("mixtral"))
    layer = next(canonical for one, canonical in pairs if one.kind == "layer")
    assert [n.target for n in layer.nodes].count("experts") == 1
    assert not [n for n in layer.nodes if "grouped" in n.target or n.target == "bmm"]
    assert [one.kind for one, _ in pairs if one.kind.endswith(EXPERTS_SUFFIX)] == ["layer/experts"]


def test_the_layer_graph_is_the_same_for_every_experts_implementation(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    digests = set()
    for name in ("grouped_mm", "batched_mm", "eager"):
        model = tiny("mixtral")
        model.set_experts_implementation(name)
        digests.add(tuple(canonical.digest for _, canonical in captured(model)))
        assert model.config._experts_implementation == name
    assert len(digests) == 1


def test_kernels_take_what_their_contract_has_and_refuse_the_rest() -> None:
    """Each gate of the expert kernels means the same there: their own reference, in fp64."""
    from shardwright.agents.structure.patterns.experts_kernels import KERNEL_GATES, choice_of
    from shardwright.agents.structure.patterns.gates import GATES
    from shardwright.kernels.grouped_lora_mlp.reference import activate_reference

    numbers = {"limit": 1.7, "alpha": 1.3, "beta": 1.1, "lambda": 0.9}
    gate, up = torch.randn(2, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    assert {"silu", "silu-clamped", "swiglu-sloped", "situ", "relu2"} <= set(KERNEL_GATES)
    for form, constants in KERNEL_GATES.items():
        activation, _ = choice_of({**constants(numbers), "transposed": False, "split": "halves"})
        found = activate_reference(gate, up if GATES[form].gated else None, activation)
        torch.testing.assert_close(found, GATES[form].oracle(gate, up, numbers), rtol=1e-12, atol=1e-12)
