"""The experts block on a base that stays packed: when its variants are open, what proves them, what the plan says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.facts import observe
from shardwright.agents.structure.join import recertify
from shardwright.agents.structure.patterns.base import Match
from shardwright.agents.structure.patterns.experts import Experts
from shardwright.agents.structure.patterns.experts_kernels import LOADED
from shardwright.agents.structure.propose import find_matches, propose
from shardwright.agents.structure.rank import Target, variants
from shardwright.kernels.evidence import EvidenceStore, shape_bucket
from shardwright.kernels.registry import source_sha256
from shardwright.schemas.fusion import FusionDecision, FusionProposal, Variant
from shardwright.schemas.ops import MeasuredTime
from shardwright.schemas.profile import Packing
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster

KINDS = {"kernel-mxfp4": "mxfp4", "kernel-fp8": "fp8"}
WIDE = {"intermediate_size": 128, "hidden_size": 128}


def gpt_oss(**changes: Any) -> Any:
    """Interleaved columns, biases, clamped gates, stacks [E, in, out]; H is not I."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 264,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    with torch.device("meta"):
        config = AutoConfig.for_model("gpt_oss", **{**sizes, **changes})
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def families(tiny: Callable[..., Any], captured: Callable[[Any], Any]) -> dict[str, tuple[Match, Any]]:
    """Name → the experts' match and the facts of its model."""
    models = {
        "mixtral": tiny("mixtral", **WIDE),
        "narrow": tiny("mixtral", intermediate_size=96),
        "gelu": tiny("mixtral", hidden_act="gelu", **WIDE),
        "gpt_oss": gpt_oss(),
    }
    found = {}
    for name, model in models.items():
        facts = observe(model, [f"model.layers.{i}" for i in range(model.config.num_hidden_layers)], ())
        match, *_ = [one for one in find_matches(captured(model)) if isinstance(one.pattern, Experts)]
        found[name] = match, facts
    return found


def stored(match: Match, form: str, roles: tuple[str, ...] = ("gate_up_proj", "down_proj")) -> dict[str, str]:
    """Parameters of a block that the files hold in a format; biases are plain."""
    return dict.fromkeys(match.all_parameters(roles), form)


def target(recipe: Recipe, packed: dict[str, str] | None) -> Target:
    return Target(load_cluster("h200-8"), None, recipe, packed=packed)  # type: ignore[arg-type]


def variant(match: Match, recipe: Recipe, packed: dict[str, str] | None, name: str) -> Variant:
    return next(v for v in variants(match, target(recipe, packed), adapted=True) if v.name == name)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_certificate_has_run_the_operators_reference_on_decoded_weights(families, family) -> None:  # type: ignore[no-untyped-def]
    match, facts = families[family]
    certificate = certify(match, facts)
    assert certificate.legal, certificate.refused_because()
    evidence = next(o.evidence for o in certificate.obligations if o.name == "differential-test")
    assert "packed_experts on decoded weights too: mxfp4 (" in evidence
    assert ("fp8 (" in evidence) == (family == "mixtral"), "an fp8 block spans gate and up where they alternate"


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda args: (*args[:7], not args[7], *args[8:]), id="columns-in-another-order"),
        pytest.param(lambda args: (*args[:8], None, args[9]), id="no-bias-before-the-gate"),
        pytest.param(lambda args: (args[0], args[1].roll(1), *args[2:]), id="rows-of-other-experts"),
    ],
)
def test_a_wrong_operator_is_refused(families, spoil, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The same certificate with a reference that reads its arguments otherwise."""
    from shardwright.kernels.packed_experts import reference

    right = reference.packed_experts_reference
    monkeypatch.setattr(reference, "packed_experts_reference", lambda *args: right(*spoil(args)))
    certificate = certify(*families["gpt_oss"])
    assert not certificate.legal and "packed_experts on mxfp4 differs by" in certificate.refused_because()


def test_bytes_that_do_not_come_back_are_refused(families, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    from shardwright.kernels.packed_experts import storage

    right = storage.mxfp4_bytes

    def wrong(stack: storage.PackedStack) -> tuple[Tensor, Tensor]:
        packed, scale = right(stack)
        return packed, scale.flip(-1)

    monkeypatch.setattr(storage, "mxfp4_bytes", wrong)
    assert "bytes do not come back" in certify(*families["mixtral"]).refused_because()


@pytest.mark.parametrize(
    ("family", "form", "roles", "kind", "why"),
    [
        ("mixtral", "mxfp4", ("gate_up_proj", "down_proj"), "mxfp4", ""),
        ("mixtral", "fp8-block", ("gate_up_proj", "down_proj"), "fp8", ""),
        ("gpt_oss", "gpt-oss-mxfp4", ("gate_up_proj", "down_proj"), "mxfp4", ""),
        ("mixtral", "mxfp4", ("gate_up_proj", "down_proj"), "fp8", "is stored as mxfp4"),
        ("mixtral", "int4-group", ("gate_up_proj", "down_proj"), "mxfp4", "is stored as int4-group"),
        ("mixtral", "mxfp4", ("down_proj",), "mxfp4", "gate_up_proj is stored plainly"),
        ("mixtral", "mxfp4", (), "mxfp4", "is stored plainly"),
        ("narrow", "mxfp4", ("gate_up_proj", "down_proj"), "mxfp4", "E 4, H 64 and I 96 with mxfp4"),
        ("gelu", "mxfp4", ("gate_up_proj", "down_proj"), "mxfp4", "packed_experts has no"),
        ("gpt_oss", "fp8-block", ("gate_up_proj", "down_proj"), "fp8", "H 64 and I 128 with fp8"),
    ],
)
def test_a_variant_is_open_where_files_and_contract_allow(families, recipe, family, form, roles, kind, why) -> None:  # type: ignore[no-untyped-def]
    match, _ = families[family]
    found = variant(match, recipe, stored(match, form, roles), f"kernel-{kind}")
    assert found.available is (why == "") and why in found.unavailable_because
    assert found.predicate.base_formats == (kind,)


def test_decoded_variants_take_every_format_that_a_profile_can_name() -> None:
    """Each is decoded at load, so eager and the kernels of plain stacks stay open."""
    assert set(LOADED) == set(get_args(Packing.model_fields["format"].annotation))


def test_what_is_unknown_or_in_another_format_is_closed(families, recipe) -> None:  # type: ignore[no-untyped-def]
    match, _ = families["mixtral"]
    packed = stored(match, "mxfp4")
    fp32 = recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"base": "float32"})})
    assert "float32" in variant(match, fp32, packed, "kernel-mxfp4").unavailable_because
    profile = type("Profile", (), {"packing": (type("Packing", (), {"format": "mxfp4"}),)})
    unknown = replace(target(recipe, None), profile=profile)  # type: ignore[arg-type]
    found = next(v for v in variants(match, unknown, adapted=True) if v.name == "kernel-mxfp4")
    assert found.unavailable_because == "which parameters are packed is not known"


@pytest.fixture(scope="module")
def proposed(families: dict[str, tuple[Match, Any]], recipe: Recipe) -> dict[str, tuple[FusionProposal, ...]]:
    """Family → its proposal, for files that hold the stacks in MXFP4."""
    found = {}
    for name in ("mixtral", "gpt_oss"):
        match, facts = families[name]
        found[name] = propose((match,), facts, target(recipe, stored(match, "mxfp4")))
    return found


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("mesh", [{}, {"ep": 2}, {"ep": 2, "shard": 4}])
def test_the_plan_takes_the_operator_of_its_base_format(families, proposed, recipe, family, mesh) -> None:  # type: ignore[no-untyped-def]
    """Kept packed: received rows at any ep. Decoded at load: the kernels of plain stacks, of the same files."""
    match, _ = families[family]

    def decided(base_format: str) -> tuple[FusionProposal, FusionDecision]:
        strategy = ParallelStrategy(mesh=Mesh(**mesh), base_format=base_format)  # type: ignore[arg-type]
        (settled,), (decision,) = recertify(proposed[family], strategy, load_cluster("h200-8"), recipe)
        return settled, decision

    proposal, decision = decided("mxfp4")
    assert (decision.variant, decision.op) == ("kernel-mxfp4", "packed_experts"), decision.reason
    assert decision.source_sha256 == source_sha256("packed_experts") and float(decision.tolerance) > 0
    assert decision.modules == match.modules() and decision.roles["down_proj"] == "down_proj"
    sharding = next(o.evidence for o in proposal.certificate.obligations if o.name == "sharding-boundary")
    whole = "eager-cut-at-dispatch" if mesh else "eager-whole"
    assert sharding.endswith((f"kernel-mxfp4, {whole}", f"{whole}, kernel-mxfp4"))
    _, plain = decided("compute")
    assert plain.op == ("grouped_lora_mlp" if mesh else "moe_layer")
    _, other = decided("fp8")
    assert other.provider == "eager" and "needs the base kept as" in other.reason


def test_a_cut_over_tensor_ranks_is_refused(proposed, recipe) -> None:  # type: ignore[no-untyped-def]
    strategy = ParallelStrategy(mesh=Mesh(tp=2), base_format="mxfp4")
    (settled,), decisions = recertify(proposed["mixtral"], strategy, load_cluster("h200-8"), recipe)
    assert decisions == () and "no variant's predicate holds" in settled.reason


def test_gains_name_the_operators_work_and_measured_times_replace_it(families, recipe, tmp_path) -> None:  # type: ignore[no-untyped-def]
    match, _ = families["mixtral"]
    goal = target(recipe, stored(match, "mxfp4") | stored(match, "fp8-block", ()))
    found = next(v for v in variants(match, goal, adapted=True) if v.name == "kernel-mxfp4")
    tokens = recipe.batch.sequence_tokens
    sizes = {"R": 2 * tokens, "E": 4, "H": 128, "I": 128}
    assert found.gain is not None and found.gain.origin == "modelled"
    assert f"R {2 * tokens}, E 4, H 128, I 128" in found.gain.basis
    wide = variant(match, recipe, stored(match, "fp8-block"), "kernel-fp8").gain
    assert wide is not None and wide.floor_ms > found.gain.floor_ms, "fp8 reads twice the bytes"
    path = tmp_path / "seen.jsonl"
    seen = MeasuredTime(
        op="packed_experts", provider="shardwright", pass_name="fwd+dx", dtype="bfloat16", versions={}, peak_bytes=0,
        shape_bucket=shape_bucket(sizes), median_ms=0.001, floor_ms=0.0005, repeats=30,
        device=goal.cluster.device.name, driver="", date="2026-01-01", source_sha256=source_sha256("packed_experts"),
    )  # fmt: skip
    EvidenceStore(path).add([seen])
    measured = next(
        v for v in variants(match, replace(goal, evidence=(path,)), adapted=True) if v.name == "kernel-mxfp4"
    )
    assert measured.gain is not None and measured.gain.time_ms == 0.001 and "measured on" in measured.gain.basis
