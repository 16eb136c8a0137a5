"""The recurrence of linear attention as one leaf, proved against the recurrence token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.agents.structure.differential import compare
from shardwright.agents.structure.opaque_rules import RULES, opaque_rules
from shardwright.agents.structure.patterns.delta_rule import ROLES, DeltaRule, rule_cases
from shardwright.agents.structure.rank import unverified
from shardwright.agents.structure.testkit import PatternContract, captured_examples, meta
from shardwright.kernels import evidence
from shardwright.kernels.registry import source_sha256
from shardwright.schemas.ops import MeasuredTime

HEADS, WIDTH = 2, 8


def _recur(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, unit: bool) -> Tensor:
    wide = [t.to(torch.float32) for t in (query, key, value, g, beta)]
    q, k, v, decay, strength = wide
    if unit:
        q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    state, out = torch.zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1], dtype=v.dtype), []
    for t in range(v.shape[1]):
        kept = decay[:, t, :, None, None] if decay.dim() == 3 else decay[:, t, :, :, None]
        state = state * kept.exp()
        missing = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", strength[:, t, :, None] * k[:, t], missing)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(out, dim=1).to(value.dtype)


def torch_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What the families' modules call, by the name that they give it."""
    return _recur(query, key, value, g, beta, use_qk_l2norm_in_kernel), None


def chunk_kimi_delta_attention(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False
) -> tuple[Tensor, Tensor | None]:
    """A function that is wrong: it forgets the decay."""
    return _recur(query, key, value, torch.zeros_like(g), beta, use_qk_l2norm_in_kernel), None


class Linear(nn.Module):
    def __init__(self, rule: str, per_channel: bool = False, unit: bool = True, write: bool = False) -> None:
        super().__init__()
        self.g_proj = nn.Linear(HEADS * WIDTH, HEADS * (WIDTH if per_channel else 1), bias=False)
        self.b_proj = nn.Linear(HEADS * WIDTH, HEADS, bias=False)
        self.__dict__["choices"] = (rule, per_channel, unit, write)

    def forward(self, mixed: Tensor) -> Tensor:
        rule, per_channel, unit, write = self.__dict__["choices"]
        q, k, v = (t.reshape(*t.shape[:2], HEADS, WIDTH) for t in mixed.chunk(3, dim=-1))
        flat = v.reshape(*v.shape[:2], -1)
        g = -F.softplus(self.g_proj(flat).float())
        g = g.view(*g.shape[:2], HEADS, WIDTH) if per_channel else g
        beta = self.b_proj(flat).sigmoid()
        if write:
            beta.mul_(2.0)
        out, _ = globals()[rule](q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=unit)
        if write:
            v.add_(1.0)
        return out.reshape(*out.shape[:2], -1) + v.reshape(*v.shape[:2], -1)


class InLayer(nn.Module):
    def __init__(self, **choices: Any) -> None:
        super().__init__()
        self.linear_attn = Linear(**choices)

    def forward(self, mixed: Tensor) -> Tensor:
        return self.linear_attn(mixed)  # type: ignore[no-any-return]


def example(rule: str = RULES[1], **choices: Any):  # type: ignore[no-untyped-def]
    return lambda: (InLayer(rule=rule, **choices), (meta(2, 6, 3 * HEADS * WIDTH),))


def hooked():  # type: ignore[no-untyped-def]
    layer, tensors = example()()
    layer.linear_attn.register_full_backward_hook(lambda module, gradients, results: None)
    return layer, tensors


class TestDeltaRule(PatternContract):
    pattern = DeltaRule()
    positives = {"heads": (example(), 1), "channels": (example(per_channel=True), 1)}
    near_misses = {
        "forgets-the-decay": example(rule=RULES[0]),
        "not-unit-length": example(unit=False),
        "written-after": example(write=True),
        "gradient-hook": hooked,
    }

    def test_the_function_is_one_node_and_comes_back(self) -> None:
        before = torch_chunk_gated_delta_rule
        (pair, *_), _ = captured_examples(example())
        assert [n.target for n in pair[1].nodes].count("delta_rule") == 1
        assert globals()[RULES[1]] is before

    def test_a_call_with_a_state_stays_as_it_is(self) -> None:
        layer = InLayer(rule=RULES[1])
        with opaque_rules(layer), torch.no_grad():
            values = rule_cases({r: (1, 3, HEADS, WIDTH) for r in ROLES} | {"g": (1, 3, HEADS), "beta": (1, 3, HEADS)})
            given = [values["normal"][role] for role in ROLES]
            out, _ = globals()[RULES[1]](*given, output_final_state=True)
        assert torch.allclose(out, _recur(*given, unit=False))

    def test_the_kernels_reference_is_among_the_witnesses(self) -> None:
        (_, certificate), *_ = self.found(example())
        (seen,) = [o.evidence for o in certificate.obligations if o.name == "differential-test"]
        assert "the kernel's reference" in seen and "over 70 tokens too" in seen


@pytest.mark.parametrize("form", ["heads", "channels"])
def test_the_oracle_tells_a_changed_decay(form: str) -> None:
    """A decay applied after the write in place of before it is another function."""
    q, beta = (1, 5, HEADS, WIDTH), (1, 5, HEADS)
    shapes = {"q": q, "k": q, "v": q, "g": q if form == "channels" else beta, "beta": beta}
    pattern, cases = DeltaRule(), {"normal": rule_cases(shapes)["normal"]}

    def shifted(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return pattern.oracle(values | {"g": values["g"].roll(1, dims=1)}, {})

    assert compare(shifted, lambda v: pattern.oracle(v, {}), cases, ROLES).error > 1e-3


@pytest.mark.parametrize(("form", "op"), [("heads", "gated_delta"), ("channels", "kda")])
def test_a_kernel_is_offered_only_with_evidence_for_its_source(
    form: str, op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time for another source, another provider or another operator opens nothing; shipped or one's own, the right
    one does."""
    pattern = DeltaRule()
    (spec,) = [s for s in pattern.variants() if s.forms == (form,)]
    assert spec.op == op
    (pair, *_), _ = captured_examples(example(per_channel=form == "channels"))
    (match,) = pattern.find(*pair)
    monkeypatch.setattr(evidence, "SHIPPED", tmp_path)
    store = evidence.EvidenceStore(tmp_path / "some-device.jsonl")
    own = evidence.EvidenceStore(tmp_path / "own" / "mine.jsonl")
    right = source_sha256(op)
    wrong = (
        {"source_sha256": "0" * 64},
        {"provider": "eager"},
        {"op": "rms_norm"},
    )
    for changed in wrong:
        store.add([measured_time(op, right, **changed)])
        own.add([measured_time(op, right, **changed)])
        assert f"no device has verified {op} at" in unverified(match, spec, (own.path,))
    own.add([measured_time(op, right)])
    assert unverified(match, spec, (own.path,)) == "" != unverified(match, spec)
    store.add([measured_time(op, right)])
    assert unverified(match, spec) == "" == pattern.refuses(match, spec)
    (eager,) = [s for s in pattern.variants() if s.provider == "eager"]
    assert pattern.must_verify(match, eager) == ()


def measured_time(op: str, sha: str, /, **changed: str) -> MeasuredTime:
    named: dict[str, Any] = {
        "op": op,
        "provider": "shardwright",
        "pass_name": "fwd+bwd",
        "device": "some device",
        "driver": "1",
        "versions": {},
        "source_sha256": sha,
        "shape_bucket": "H1,T64",
        "dtype": "bfloat16",
        "median_ms": 1.0,
        "floor_ms": 0.5,
        "peak_bytes": 1,
        "repeats": 1,
        "date": "2026-01-01",
    }
    return MeasuredTime(**{**named, **changed})
