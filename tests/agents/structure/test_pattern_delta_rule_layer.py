"""Linear attention between its projections as one region, in the families' own modules and in a layer of our own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.join import recertify
from shardwright.agents.structure.patterns.delta_rule import DeltaRule
from shardwright.agents.structure.patterns.delta_rule_layer import DeltaRuleLayer
from shardwright.agents.structure.propose import find_matches, propose
from shardwright.agents.structure.rank import Target, unverified
from shardwright.agents.structure.testkit import Example, PatternContract, captured_examples, meta
from shardwright.kernels import evidence
from shardwright.kernels.kda.reference import kda_recurrent_reference
from shardwright.kernels.registry import source_sha256
from shardwright.schemas.errors import KernelError
from shardwright.schemas.ops import MeasuredTime
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster

HIDDEN, HEADS, WIDTH = 32, 2, 8
KDA = {"linear_num_heads": HEADS, "linear_head_dim": WIDTH}
SCALAR = {"linear_num_key_heads": HEADS, "linear_num_value_heads": 2 * HEADS}
SCALAR |= {"linear_key_head_dim": WIDTH, "linear_value_head_dim": WIDTH}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kimi_linear": ("KimiLinearDeltaAttention", "KimiLinearConfig", KDA),
    "bailing_hybrid": ("BailingHybridDeltaAttention", "BailingHybridConfig", KDA),
    "glm5_next": ("Glm5NextTextLinearAttention", "Glm5NextTextConfig", KDA),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", "Qwen3NextConfig", SCALAR),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig", SCALAR),
}


class InLayer(nn.Module):
    """The attention inside a decoder layer, which is one FSDP unit."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.linear_attn = attention

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear_attn(hidden)  # type: ignore[no-any-return]


def family(name: str, width: int = WIDTH, **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    home = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    made, config, sizes = FAMILIES[name]
    named = {key: width if "head_dim" in key else value for key, value in sizes.items()} | changes
    settings = getattr(transformers, config)(hidden_size=HIDDEN, num_hidden_layers=2, **named)
    for key, value in named.items():
        setattr(settings, key, value)
    attention: nn.Module = getattr(home, made)(settings, layer_idx=0)
    return attention


def of(name: str, **changes: Any) -> Example:
    return lambda: (InLayer(family(name, **changes)), (meta(2, 6, HIDDEN),))


def k3(heads: int = HEADS, width: int = WIDTH, bound: float = -5.0) -> Example:
    from shardwright.checkpoints.models.kimi_k3.attention import DeltaAttention

    config = SimpleNamespace(hidden_size=HIDDEN, linear_num_heads=heads, linear_head_dim=width, rms_norm_eps=1e-5)
    config.linear_conv_kernel_dim, config.gate_lower_bound, config.a_log_size = 4, bound, heads + 3
    return lambda: (InLayer(DeltaAttention(config)), (meta(2, 6, HIDDEN),))


def chunk_kimi_delta_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False
) -> tuple[Tensor, None]:
    """What ``Layer`` calls, by the name that the families give it."""
    assert use_qk_l2norm_in_kernel
    return kda_recurrent_reference(query, key, value, g, beta, gate="given", beta_sigmoid=False)[0], None


class Norm(nn.Module):
    def __init__(self, choices: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.__dict__["choices"] = choices

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        kind, first = hidden_states.dtype, self.choices.get("gate_first")
        wide = hidden_states.float()
        if first:
            wide = wide * torch.sigmoid(gate.float())
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.choices.get("eps", 1e-5))
        wide = self.weight.float() * wide
        return (wide if first else wide * torch.sigmoid(gate.float())).to(kind)


class Layer(nn.Module):
    """A KDA layer in which one thing is otherwise."""

    def __init__(self, **choices: Any) -> None:
        super().__init__()
        inner = HEADS * WIDTH
        self.q_proj, self.k_proj, self.v_proj, self.f_proj, self.g_proj = (
            nn.Linear(HIDDEN, inner, bias=False) for _ in range(5)
        )
        if choices.get("joined"):
            self.qkv_proj = nn.Linear(HIDDEN, 3 * inner, bias=False)
        self.b_proj = nn.Linear(HIDDEN, HEADS, bias=False)
        taps, bias = choices.get("taps", 4), choices.get("bias", False)
        self.conv1d = nn.Conv1d(3 * inner, 3 * inner, taps, groups=3 * inner, padding=taps - 1, bias=bias)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(HEADS)), nn.Parameter(torch.zeros(inner))
        self.o_norm = Norm(choices)
        self.o_proj = nn.Linear(inner, HIDDEN, bias=False)
        self.__dict__["choices"] = choices

    def forward(self, x: Tensor) -> Any:
        choices, T, heads = self.choices, x.shape[1], (*x.shape[:2], -1, WIDTH)
        x = x * 2 if choices.get("input_changed") else x
        joined = choices.get("joined")
        streams = self.qkv_proj(x).chunk(3, dim=-1) if joined else [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        mixed = torch.cat([*streams], dim=-1).transpose(1, 2)
        if choices.get("written_before"):
            mixed.mul_(2.0)
        padding = self.conv1d.weight.shape[-1] - 1 - choices.get("shifted", 0)
        out = F.conv1d(mixed, self.conv1d.weight, self.conv1d.bias, padding=padding, groups=mixed.shape[1])[:, :, :T]
        opened = choices.get("act", F.silu)(out)
        if choices.get("written_between"):
            out.add_(1.0)
        q, k, v = (t.reshape(heads) for t in opened.transpose(1, 2).chunk(3, dim=-1))
        raw = self.f_proj(x).to(choices.get("gate_dtype", torch.float32))
        biased = (raw + self.dt_bias.float()).view(heads)
        rate = self.A_log.float().exp().view(HEADS, 1)
        bound = choices.get("bound", -5.0)
        g = bound * torch.sigmoid(rate * biased) if bound else -rate * F.softplus(biased)
        beta = self.b_proj(x).sigmoid() * (2.0 if choices.get("beta_doubled") else 1.0)
        o, _ = chunk_kimi_delta_attention(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        y = self.o_norm(o, self.g_proj(x).view(heads)).reshape(*x.shape[:2], -1)
        result = self.o_proj(y)
        if choices.get("read_elsewhere"):
            return result + out.sum(1, keepdim=True).transpose(1, 2)
        return (result, None) if choices.get("pair") else result * 3 if choices.get("result_changed") else result


def own(**choices: Any) -> Example:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        layer = InLayer(Layer(**choices))
        if choices.get("pair"):
            layer.forward = lambda hidden: hidden + layer.linear_attn(hidden)[0]  # type: ignore[method-assign]
        return layer, (meta(2, 6, HIDDEN),)

    return made


def hooked(where: str) -> Example:
    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        layer, tensors = own()()
        layer.get_submodule(where).register_full_backward_hook(lambda module, gradients, results: None)
        return layer, tensors

    return made


class TestDeltaRuleLayer(PatternContract):
    pattern = DeltaRuleLayer()
    positives = {
        "own": (own(), 1),
        "own-softplus": (own(bound=0.0), 1),
    }
    near_misses = {
        "convolution-with-bias": own(bias=True),
        "nine-taps": own(taps=9),
        "one-tap": own(taps=1),
        "looks-ahead": own(shifted=1),
        "another-activation": own(act=torch.relu),
        "gate-before-the-norm": own(gate_first=True),
        "double-step": own(beta_doubled=True),
        "gate-in-half": own(gate_dtype=torch.float16),
        "written-before": own(written_before=True),
        "written-between": own(written_between=True),
        "convolution-read-elsewhere": own(read_elsewhere=True),
        "hook-on-the-convolution": hooked("linear_attn"),
        "hook-on-the-norm": hooked("linear_attn.o_norm"),
    }
    least_mutants = 12

    @pytest.mark.parametrize("name", [*FAMILIES, "kimi_k3"])
    def test_the_families_layers_are_proved_and_name_every_operator(self, name: str) -> None:
        ((match, certificate),) = self.found(k3() if name == "kimi_k3" else of(name))
        assert certificate.legal, certificate.refused_because()
        rule = "gated_delta" if name.startswith("qwen") else "kda"
        assert certificate.bound_constants["operators"] == f"{rule} short_conv gated_rms_norm"
        assert certificate.bound_constants["not_plain"] == ""
        assert {role for role in match.roles if role.endswith(("weight", "a_log", "dt_bias"))} == set(match.parameters)
        (spec,) = [s for s in self.pattern.variants() if s.op == rule]
        assert [op for op, _ in self.pattern.kernel_parts(match, spec, 64)] == [
            *["short_conv"] * 3,
            rule,
            "gated_rms_norm",
        ]
        (seen,) = [o.evidence for o in certificate.obligations if o.name == "differential-test"]
        assert "the kernel's reference" in seen and "over 70 tokens too" in seen

    def test_ranges_of_one_projection_are_named(self) -> None:
        ((match, certificate),) = self.found(own(joined=True))
        assert certificate.legal, certificate.refused_because()
        assert {match.roles[role] for role in ("q", "k", "v")} == {"qkv_proj"} and match.constants["not_plain"] == ""
        starts = [tuple(match.constants[f"{role}_{what}"] for what in ("groups", "start", "stop")) for role in "qkv"]
        assert starts == [(1, 0, 16), (1, 16, 32), (1, 32, 48)]

    @pytest.mark.parametrize(
        ("choices", "because"),
        [
            ({"input_changed": True}, "changes its input"),
            ({"result_changed": True}, "behind its last projection"),
            ({"pair": True}, "returns tuple"),
        ],
    )
    def test_a_module_that_does_more_keeps_its_own_forward(self, choices: dict[str, Any], because: str) -> None:
        """The region is the same; only what workers could install is not offered."""
        ((match, certificate),) = self.found(own(**choices))
        assert certificate.legal
        for spec in self.pattern.variants():
            assert (because in self.pattern.refuses(match, spec)) == (spec.provider == "shardwright")


@pytest.mark.parametrize(
    ("choices", "because"),
    [
        ({"bias": True}, "the convolution has a bias"),
        ({"taps": 9}, "9 taps; the operator takes 2 to 8"),
        ({"act": torch.relu}, "come from relu"),
        ({"gate_first": True}, "no gated norm"),
        ({"beta_doubled": True}, "made by mul, not by a sigmoid"),
    ],
)
def test_what_is_spelled_otherwise_leaves_the_recurrence_and_says_why(choices: dict[str, Any], because: str) -> None:
    pairs, facts = captured_examples(own(**choices))
    assert [m for pair in pairs for m in DeltaRuleLayer().find(*pair)] == []
    (match,) = [m for pair in pairs for m in DeltaRule().find(*pair)]
    certificate = certify(match, facts)
    assert certificate.legal
    assert because in str(certificate.bound_constants["alone_because"])


def test_a_whole_layer_leaves_no_reason_at_its_recurrence() -> None:
    (pair, *_), _ = captured_examples(of("kimi_linear"))
    (match,) = DeltaRule().find(*pair)
    assert "alone_because" not in match.constants


@pytest.mark.parametrize(
    ("example", "few"),
    [
        (k3(heads=12, width=64), {12: 2, 12 * 64: 128}),
        (of("qwen3_next", width=64, linear_num_key_heads=8, linear_num_value_heads=16), {8: 2, 16: 4, 512: 128}),
    ],
)
def test_many_heads_are_proved_on_few(example: Example, few: dict[int, int]) -> None:
    (pair, *_), facts = captured_examples(example)
    (match,) = DeltaRuleLayer().find(*pair)
    sizes = DeltaRuleLayer().sizes(match)
    assert {size: sizes.of(size) for size in few} == few and sizes.of(64) == 64
    assert certify(match, facts).legal


def test_heads_that_cannot_be_told_from_widths_are_not_proved() -> None:
    (pair, *_), facts = captured_examples(k3(heads=16, width=16))
    (match,) = DeltaRuleLayer().find(*pair)
    certificate = certify(match, facts)
    assert "cannot be told" in certificate.refused_because()


@pytest.mark.parametrize(
    ("example", "code"),
    [(k3(width=64), ""), (k3(width=8), "width-unsupported"), (k3(width=64, bound=-6.0), "bad-bound")],
)
def test_the_operators_contracts_look_at_the_sizes(example: Example, code: str) -> None:
    (pair, *_), _ = captured_examples(example)
    (match,) = DeltaRuleLayer().find(*pair)
    if not code:
        assert DeltaRuleLayer().check_kernel(match, "kda", torch.bfloat16)
        return
    with pytest.raises(KernelError, match=code):
        DeltaRuleLayer().check_kernel(match, "kda", torch.bfloat16)


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next"])
def test_operators_are_offered_only_with_evidence_for_each_source(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = DeltaRuleLayer()
    (pair, *_), _ = captured_examples(of(name))
    (match,) = pattern.find(*pair)
    (spec,) = [s for s in pattern.variants() if s.computes(match.constants) and s.provider == "shardwright"]
    monkeypatch.setattr(evidence, "SHIPPED", tmp_path)
    store = evidence.EvidenceStore(tmp_path / "some-device.jsonl")
    operators = str(match.constants["operators"]).split()
    assert operators[0] == spec.op
    assert "gated_rms_norm" not in unverified(match, spec), "the norm needs no time, here as little as alone"
    for op in operators[:2]:
        assert op in unverified(match, spec)
        store.add([timed(op)])
        assert op not in unverified(match, spec).split(" at its")[0]
    assert unverified(match, spec) == "" == pattern.refuses(match, spec)


def timed(op: str) -> MeasuredTime:
    return MeasuredTime(
        op=op,
        provider="shardwright",
        pass_name="fwd+bwd",
        device="some device",
        driver="1",
        versions={},
        source_sha256=source_sha256(op),
        shape_bucket="H1,T64",
        dtype="bfloat16",
        median_ms=1.0,
        floor_ms=0.5,
        peak_bytes=1,
        repeats=1,
        date="2026-01-01",
    )


@pytest.mark.parametrize(("name", "variant"), [("kimi_linear", "kernel"), ("qwen3_next", "kernel-heads")])
def test_on_a_device_that_has_verified_them_the_operators_are_chosen_for_the_whole_layer(
    name: str, variant: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer goes before its recurrence and its norm; without evidence for one operator it does not run them."""
    pairs, facts = captured_examples(of(name, width=64))
    profile: Any = None
    target = Target(load_cluster("h200-1"), profile, recipe, (), packed={})
    monkeypatch.setattr(evidence, "SHIPPED", tmp_path)
    store = evidence.EvidenceStore(tmp_path / "some-device.jsonl")
    rule, *others = str(DeltaRuleLayer().find(*pairs[0])[0].constants["operators"]).split()
    store.add([timed(rule)])
    chosen = {one.pattern: one for one in propose(find_matches(pairs), facts, target)}
    assert chosen["delta_rule_layer"].chosen is None
    assert f"no device has verified {others[0]} at" in chosen["delta_rule_layer"].reason
    store.add([timed(others[0])])
    chosen = {one.pattern: one for one in propose(find_matches(pairs), facts, target)}
    layer = chosen.pop("delta_rule_layer")
    assert layer.chosen == variant
    gain = next(v.gain for v in layer.variants if v.name == variant)
    assert gain is not None and gain.origin == "modelled" and gain.speedup > 1
    assert {one.pattern for one in chosen.values() if layer.id in one.reason} >= {"delta_rule", "gated_rms_norm"}
    _, (decision,) = recertify((layer,), ParallelStrategy(mesh=Mesh()), target.cluster, recipe)
    assert (decision.op, decision.source_sha256) == (rule, source_sha256(rule))
    assert decision.beside == {other: source_sha256(other) for other in others}
