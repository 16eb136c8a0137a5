"""A certificate must catch a matcher that is wrong, and state of the model that makes a match illegal."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.facts import ModelFacts, observe
from shardwright.agents.structure.obligations import EXAMINERS, no_randomness
from shardwright.agents.structure.patterns import PATTERNS
from shardwright.agents.structure.propose import find_matches
from shardwright.agents.structure.region import extract
from shardwright.agents.structure.testkit import captured_example, meta
from shardwright.schemas.fusion import ObligationName
from shardwright.schemas.lora import LoraTarget


def by_name(certificate):  # type: ignore[no-untyped-def]
    return {o.name: o for o in certificate.obligations}


@pytest.fixture(scope="module")
def deepseek(tiny, captured):  # type: ignore[no-untyped-def]
    model = tiny("deepseek_v3")
    facts = observe(model, [f"model.layers.{i}" for i in range(3)], ())
    return facts, find_matches(captured(model))


def pick(matches, pattern: str, label: str):  # type: ignore[no-untyped-def]
    return next(m for m in matches if m.pattern.name == pattern and m.label == label and not m.seam)


def test_every_obligation_has_an_examiner() -> None:
    assert list(EXAMINERS) == list(get_args(ObligationName))


def test_pattern_names_are_unique() -> None:
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)


@pytest.mark.parametrize("constants", [{"eps": 1e-3}, {"form": "unit-offset"}, {"form": "native"}])
def test_wrong_constants_fail_the_retrace(deepseek, constants) -> None:  # type: ignore[no-untyped-def]
    facts, matches = deepseek
    match = pick(matches, "rms_norm", "input_layernorm")
    lying = replace(match, constants={**match.constants, **constants})
    found = by_name(certify(lying, facts))
    assert found["re-trace"].status == "refuted"
    if "eps" in constants or constants["form"] == "unit-offset":
        assert found["differential-test"].status == "refuted"


def test_exchanged_operands_fail_both_checks(deepseek) -> None:  # type: ignore[no-untyped-def]
    facts, matches = deepseek
    match = pick(matches, "swiglu", "mlp")
    inputs = dict(match.region.inputs)
    inputs["gate"], inputs["up"] = inputs["up"], inputs["gate"]
    region = extract(match.region.canonical, inputs, match.region.outputs)
    assert region is not None
    found = by_name(certify(replace(match, region=region), facts))
    assert found["re-trace"].status == found["differential-test"].status == "refuted"


def test_roles_that_do_not_enclose_a_region_are_no_match(deepseek) -> None:  # type: ignore[no-untyped-def]
    _, matches = deepseek
    region = pick(matches, "rms_norm", "input_layernorm").region
    assert extract(region.canonical, {"x": region.inputs["x"]}, region.outputs) is None
    unread = {**region.inputs, "more": region.canonical.nodes[-1].id}
    assert extract(region.canonical, unread, region.outputs) is None


@pytest.mark.parametrize("place", ["self", "other-instance", "parameter", "global"])
def test_hooks_anywhere_on_the_region_refuse_it(place, tiny, captured) -> None:  # type: ignore[no-untyped-def]
    model = tiny("mixtral")
    handles = []
    norms = [layer.post_attention_layernorm for layer in model.model.layers]
    if place == "self":
        handles.append(norms[0].register_forward_hook(lambda *a: None))
    elif place == "other-instance":
        handles.append(norms[2].register_full_backward_pre_hook(lambda *a: None))
    elif place == "parameter":
        handles.append(norms[1].weight.register_post_accumulate_grad_hook(lambda p: None))
    else:
        handles.append(nn.modules.module.register_module_forward_hook(lambda *a: None))
    facts = observe(model, [f"model.layers.{i}" for i in range(3)], ())
    for handle in handles:
        handle.remove()
    matches = find_matches(captured(model))
    for pattern in ("rms_norm", "add_rms_norm"):
        assert by_name(certify(pick(matches, pattern, "post_attention_layernorm"), facts))["hooks"].status == "refuted"
    untouched = by_name(certify(pick(matches, "rms_norm", "input_layernorm"), facts))["hooks"].status
    assert untouched == ("refuted" if place == "global" else "proved")


def test_randomness_inside_is_refuted() -> None:
    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.silu(F.dropout(x, 0.1)) * 2.0

    captured, canonical, facts = captured_example(lambda: (Dropped(), (meta(2, 6, 64),)))
    x = next(n.id for n in canonical.nodes if n.kind == "input")
    region = extract(canonical, {"x": x}, {"y": canonical.outputs[0]})
    assert region is not None
    match = replace(_any_match(), captured=captured, region=region)
    assert no_randomness(match, facts)[0] == "refuted"


def _any_match():  # type: ignore[no-untyped-def]
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up

    captured, canonical, _ = captured_example(lambda: (Pair(), (meta(2, 6, 64),)))
    return next(iter(find_matches([(captured, canonical)])))


def test_dropout_of_probability_zero_is_no_randomness(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    layer = next(c for one, c in captured(tiny("mixtral", attention_dropout=0.0)) if one.kind == "layer")
    assert not [n for n in layer.nodes if "dropout" in n.target]


def test_tied_weights_are_named(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    model = tiny("mixtral", tie_word_embeddings=True)
    model.tie_weights()
    facts = observe(model, (), ())
    match = pick(find_matches(captured(model)), "linear_cross_entropy", "lm_head")
    obligation = by_name(certify(match, facts))["tied-weights"]
    assert obligation.status == "proved" and "model.embed_tokens.weight" in obligation.evidence
    moved = type("Moved", (type(match.pattern),), {"relayout": "weight transposed"})
    refused = by_name(certify(replace(match, pattern=moved()), facts))
    assert refused["tied-weights"].status == "refuted" and refused["reversible-layout"].status == "unknown"


def test_adapters_inside_are_named(tiny, captured) -> None:  # type: ignore[no-untyped-def]
    model = tiny("mixtral")
    target = LoraTarget(
        parameter="model.layers.1.mlp.experts.down_proj",
        role="experts",
        kind="experts",
        in_features=96,
        out_features=64,
        num_experts=4,
        rank=4,
        alpha="8",
        scaling="2",
    )
    facts = observe(model, [f"model.layers.{i}" for i in range(3)], (target,))
    matches = find_matches(captured(model))
    experts = by_name(certify(pick(matches, "experts", "experts"), facts))["lora-inside"]
    norm = by_name(certify(pick(matches, "rms_norm", "input_layernorm"), facts))["lora-inside"]
    assert "model.layers.1.mlp.experts.down_proj" in experts.evidence and experts.status == "proved"
    assert norm.evidence.startswith("no LoRA target")


def test_a_region_over_two_units_is_refused(deepseek) -> None:  # type: ignore[no-untyped-def]
    _, matches = deepseek
    match = pick(matches, "swiglu", "mlp")
    split = ModelFacts(units=("model.layers.0.mlp.gate_proj", "model.layers.0"), environment={"torch": "x"})
    obligation = by_name(certify(match, split))["sharding-boundary"]
    assert obligation.status == "refuted" and "2 FSDP units" in obligation.evidence
