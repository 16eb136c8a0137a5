"""A linear-attention layer whose convolution, gates, recurrence and norm are operators is the family's own layer.

Decisions are made of what the structure agent proves of the same layer. The operators' own tests hold them to the plain
references that stand in here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.agents.structure.join import decision_constants
from shardwright.agents.structure.patterns.base import Match
from shardwright.agents.structure.patterns.delta_rule_layer import DeltaRuleLayer
from shardwright.agents.structure.run import run_structure
from shardwright.agents.structure.testkit import captured_examples
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.kernels.registry import OPERATORS, source_sha256
from shardwright.runtime.fuse import fusions_off, install_fusions
from shardwright.runtime.fused_delta_layer import fused_delta_layer
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.runtime.segments import segments
from shardwright.schemas.errors import LegalityError, StalePlanError
from shardwright.schemas.fusion import FusionDecision, FusionProposal
from shardwright.schemas.recipe import Recipe
from shardwright.search_spaces.catalogue import load_cluster

HIDDEN, WIDTH, TOKENS = 32, 8, 20
KDA = {"linear_num_heads": 2, "linear_head_dim": WIDTH}
SCALAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
SCALAR |= {"linear_key_head_dim": WIDTH, "linear_value_head_dim": WIDTH}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kimi_linear": ("KimiLinearDeltaAttention", "KimiLinearConfig", KDA),
    "bailing_hybrid": ("BailingHybridDeltaAttention", "BailingHybridConfig", KDA),
    "glm5_next": ("Glm5NextTextLinearAttention", "Glm5NextTextConfig", KDA),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", "Qwen3NextConfig", SCALAR),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig", SCALAR),
}
EVERY = (*FAMILIES, "kimi_k3")
RULE = {"kimi_linear": "kda", "qwen3_next": "gated_delta"}
LORA = {"targets": ["attention", "experts"], "rank": 2, "alpha": "4"}
PLAIN = {
    "kda": "kda.reference:kda_recurrent_reference",
    "gated_delta": "gated_delta.reference:gated_delta_recurrent_reference",
    "short_conv": "short_conv.reference:short_conv_reference",
    "gated_rms_norm": "gated_rms_norm.reference:gated_rms_norm_reference",
}
"""Operator → its plain reference."""


def bare_layer(family: str) -> nn.Module:
    if family == "kimi_k3":
        from shardwright.checkpoints.models.kimi_k3.attention import DeltaAttention

        config = SimpleNamespace(hidden_size=HIDDEN, rms_norm_eps=1e-5, gate_lower_bound=-5.0, a_log_size=5, **KDA)
        config.linear_conv_kernel_dim = 4
        return DeltaAttention(config)
    transformers = pytest.importorskip("transformers")
    home = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    made, config, sizes = FAMILIES[family]
    settings = getattr(transformers, config)(hidden_size=HIDDEN, num_hidden_layers=2, **sizes)
    for name, value in sizes.items():
        setattr(settings, name, value)
    layer: nn.Module = getattr(home, made)(settings, layer_idx=0)
    return layer


def layer_of(family: str) -> nn.Module:
    """In fp32, with random values."""
    layer = bare_layer(family).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in layer.parameters():
            value.normal_(0.0, 0.3, generator=generator)
    return layer


def match_of(family: str) -> Match:
    """What the structure agent finds in the layer."""
    given = (torch.empty(2, 12, HIDDEN, dtype=torch.bfloat16, device="meta"),)
    (pair, *_), _ = captured_examples(lambda: (bare_layer(family), given))
    (match,) = DeltaRuleLayer().find(*pair)
    return match


def decision_of(family: str) -> FusionDecision:
    """As a plan has it."""
    match = match_of(family)
    proposal: Any = SimpleNamespace(certificate=SimpleNamespace(bound_constants=match.constants))
    op, *others = str(match.constants["operators"]).split()
    named: dict[str, Any] = {
        "proposal_id": "delta_rule_layer.1",
        "pattern": "delta_rule_layer",
        "variant": "kernel",
        "provider": "shardwright",
        "op": op,
        "modules": ("0",),
        "roles": match.roles,
        "constants": decision_constants(proposal),
        "source_sha256": source_sha256(op),
        "beside": {other: source_sha256(other) for other in others},
        "tolerance": "0.02",
    }
    return FusionDecision(**named)


@pytest.fixture
def plain_operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators' plain references in their places; names of those that were called."""
    called: list[str] = []

    def recorded(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **settings: Any) -> Any:
            called.append(op)
            return function(*given, **settings)

        return run

    for op, path in PLAIN.items():
        monkeypatch.setitem(OPERATORS, op, replace(OPERATORS[op], op_path=path))
        place, _, name = path.partition(":")
        home = import_module(f"shardwright.kernels.{place}")
        monkeypatch.setattr(home, name, recorded(op, getattr(home, name)))
    return called


def inputs(batch: int = 2) -> Tensor:
    return torch.randn(batch, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", EVERY)
def test_outputs_and_gradients_are_the_familys_own(family: str, plain_operators: list[str]) -> None:
    """To 1e-5 of the largest value, for the input and every parameter; off again by the switch.

    A gradient far smaller than the others, as that of A_log, is a difference of large sums: it is held to a hundredth
    of the largest.
    """
    decision = decision_of(family)
    layer, x = layer_of(family), inputs().requires_grad_()
    leaves = [x, *layer.parameters()]
    wanted = layer(x)
    first = torch.autograd.grad(wanted.square().mean(), leaves)
    switches = install_fusions(nn.ModuleList([layer]), (decision,))
    plain_operators.clear()
    found = layer(x)
    assert sorted(plain_operators) == sorted([*str(decision.constants["operators"]).split(), *["short_conv"] * 2])
    assert float((found - wanted).detach().abs().max()) <= 1e-5 * float(wanted.detach().abs().max())
    second = torch.autograd.grad(found.square().mean(), leaves)
    largest = max(float(b.abs().max()) for b in first)
    for a, b in zip(second, first, strict=True):
        assert float(b.abs().max()) > 0
        assert float((a - b).abs().max()) <= 1e-5 * max(float(b.abs().max()), 1e-2 * largest)
    with fusions_off(switches):
        assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize("family", EVERY)
def test_documents_of_packed_rows_meet_neither_in_the_convolution_nor_in_the_state(
    family: str, plain_operators: list[str]
) -> None:
    decision = decision_of(family)
    layer, x = layer_of(family), inputs()
    bounds = ((0, 2, 9, TOKENS), (0, TOKENS))
    alone = torch.cat([torch.cat([layer(x[:1, a:b]) for a, b in ((0, 2), (2, 9), (9, TOKENS))], 1), layer(x[1:])])
    forward = fused_delta_layer(layer, "0", decision)
    with segments(bounds):
        found = forward(x)
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    assert float((forward(x) - alone)[0, 2:].detach().abs().max()) > 1e-3, "without bounds the documents meet"
    assert plain_operators


def test_an_adapter_takes_its_projections_place(plain_operators: list[str]) -> None:
    """Adapters of two projections, one of them cut into four values: gradients as without the operators."""
    decision = decision_of("qwen3_next")
    results = []
    for fused in (False, True):
        layer = layer_of("qwen3_next")
        torch.manual_seed(5)
        for path in ("in_proj_qkvz", "out_proj"):
            setattr(layer, path, LoraLinear(layer.get_submodule(path), 4, 2.0, 0.0, torch.float32))
        adapters = [value for name, value in layer.named_parameters() if "lora" in name]
        with torch.no_grad():
            for adapter in adapters:
                adapter.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(adapter.numel()))
        if fused:
            install_fusions(nn.ModuleList([layer]), (decision,))
        y = layer(inputs())
        results.append([y, *torch.autograd.grad(y.square().mean(), adapters)])
    assert len(results[0]) == 5
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_padding_mask_or_a_cache_runs_the_familys_own(plain_operators: list[str]) -> None:
    layer, x = layer_of("kimi_linear"), inputs()
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[0, :3] = 0
    wanted = layer(x, attention_mask=mask)
    forward = fused_delta_layer(layer, "0", decision_of("kimi_linear"))
    assert torch.equal(forward(x, attention_mask=mask), wanted)
    assert plain_operators == []


def test_another_source_of_any_operator_is_refused() -> None:
    decision = decision_of("kimi_linear")
    layer = nn.ModuleList([layer_of("kimi_linear")])
    assert set(decision.beside) == {"short_conv", "gated_rms_norm"}
    for op in decision.beside:
        for hashes in ({**decision.beside, op: "0" * 64}, {k: v for k, v in decision.beside.items() if k != op}):
            with pytest.raises(StalePlanError, match=f"kernel-source.*{op}"):
                install_fusions(layer, (decision.model_copy(update={"beside": hashes}),))
    with pytest.raises(StalePlanError, match="kernel-source"):
        install_fusions(layer, (decision.model_copy(update={"source_sha256": "0" * 64}),))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"roles": {"gate": ""}}, "gate"),
        ({"roles": {"conv_weight": "convolution.weight"}}, "convolution.weight"),
        ({"constants": {"operators": "kda short_conv"}}, "three operators"),
        ({"constants": {"operators": "gated_delta short_conv gated_rms_norm"}}, "three operators"),
    ],
)
def test_a_plan_that_does_not_fit_the_module_is_refused(changed: dict[str, Any], said: str) -> None:
    decision = decision_of("kimi_linear")
    other = decision.model_copy(update={name: {**getattr(decision, name), **new} for name, new in changed.items()})
    with pytest.raises(LegalityError, match=f"fusion-delta-rule.*{said}"):
        fused_delta_layer(layer_of("kimi_linear"), "0", other)
    with pytest.raises(LegalityError, match="fusion-delta-rule"):
        fused_delta_layer(nn.Linear(2, 2), "0", decision)


def test_interpreted(tmp_path: Path) -> None:
    """The operators themselves. The interpreter is chosen when kernels are imported, so it needs its own process."""
    pytest.importorskip("triton", reason="kernels need triton")
    file = Path(__file__).parent / "interpreted" / "checks_delta_layer.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-q", f"--basetemp={tmp_path / 'inner'}"]
    command = ["timeout", "-k", "5", "240", sys.executable, "-m", "pytest", str(file), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


TINY: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        "num_hidden_layers": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [1],
            "head_dim": WIDTH,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "qwen3_next": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 16,
        **SCALAR,
    },
}
STEMS = {"kimi_linear": "KimiLinear", "qwen3_next": "Qwen3Next"}
PLACE = {"kimi_linear": "model.layers.0.self_attn", "qwen3_next": "model.layers.0.linear_attn"}
COMMON = {"vocab_size": 96, "hidden_size": HIDDEN, "num_attention_heads": 4, "intermediate_size": 48, "num_experts": 8}
COMMON |= {"moe_intermediate_size": 16, "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def proposed(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, FusionProposal]]:
    """A tiny checkpoint of two families, and what the structure agent proposes for its linear attention."""
    transformers = pytest.importorskip("transformers")
    made = {}
    for family, fields in TINY.items():
        torch.manual_seed(7)
        config = getattr(transformers, f"{STEMS[family]}Config")(**COMMON, **fields)
        model = getattr(transformers, f"{STEMS[family]}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3)
        out = tmp_path_factory.mktemp(family)
        model.save_pretrained(out / "checkpoint")
        for file in ("train.jsonl", "held_out.jsonl"):
            shutil.copy(tiny.data / file, out / file)
        profile = profile_checkpoint(out / "checkpoint")
        recipe = Recipe.model_validate({"data": {"train": "train.jsonl", "held_out": "held_out.jsonl"}, "lora": LORA})
        found = run_structure(out / "checkpoint", profile, load_cluster("cpu-2"), recipe).proposals
        (layer,) = [proposal for proposal in found if proposal.pattern == "delta_rule_layer"]
        made[family] = type(tiny)(out / "checkpoint", out), layer
    return made


def test_a_plan_proposes_the_one_region(proposed: Any) -> None:
    """On a CPU it stays eager, and the kernel says why."""
    for family, (_, one) in proposed.items():
        assert one.region.modules == (PLACE[family],)
        assert one.certificate.legal, one.certificate.refused_because()
        (kernel,) = [v for v in one.variants if v.provider == "shardwright" and v.op == RULE[family]]
        assert not kernel.available and kernel.unavailable_because == "needs cuda; the cluster has cpu"
        assert one.certificate.bound_constants["operators"] == f"{RULE[family]} short_conv gated_rms_norm"
        assert one.chosen == "eager", one.reason


@pytest.mark.parametrize("ranks", [1, 2])
def test_meshes_train_with_the_operators_as_plain_transformers_do(
    ranks: int, proposed: Any, make_job: Any, strategy: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Loss, gradient norm and every adapter's gradient to 1e-5 on one rank, and sharded over two."""
    jobs = []
    for family, (example, proposal) in proposed.items():
        fusions = (accepted(proposal, RULE[family]),)
        planned = strategy(shard=ranks, accumulation_steps=8 // ranks, checkpointing="full" if ranks == 2 else "none")
        recipe = {"batch": {"global_batch_sequences": 8}, "lora": LORA}
        job = make_job(example, planned, recipe=recipe, fusions=fusions)
        jobs.append((family, str(job.plan_path), str(example.checkpoint)))
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    out = on_ranks(ranks, "delta_layer.py", str(path))
    lines = [line for line in out.splitlines() if "worst" in line]
    assert len(lines) == len(proposed), out
    for family, line in zip(proposed, lines, strict=True):
        assert line.endswith(f"operators {' '.join(sorted((RULE[family], 'short_conv', 'gated_rms_norm')))}")


def accepted(proposal: FusionProposal, op: str) -> FusionDecision:
    """The decision for the operators' variant, which a CPU's plan leaves eager."""
    others = str(proposal.certificate.bound_constants["operators"]).split()[1:]
    return FusionDecision(
        proposal_id=proposal.id,
        pattern=proposal.pattern,
        variant="kernel",
        provider="shardwright",
        op=op,
        modules=proposal.region.modules,
        roles=proposal.region.roles,
        constants=decision_constants(proposal),
        source_sha256=source_sha256(op),
        beside={other: source_sha256(other) for other in others},
        tolerance="0.02",
    )
