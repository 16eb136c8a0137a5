"""What a plan for one device decides for the models of the training-step cases, made from their modules.

``tests/benchmarks/test_train_step_decisions.py`` holds these to the structure agent's own decisions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from shardwright.kernels.registry import OPERATORS, ROOM, OperatorEntry, source_sha256
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.parallelize import decoder_layers
from shardwright.schemas.fusion import FusionDecision

FUSIONS = ("moe_layer", "router", "rms_norm", "add_rms_norm", "qk_norm_rope", "kda", "linear_cross_entropy")
"""Operators that a case may use; ``grouped_lora_mlp`` takes the place of ``moe_layer`` where it is named instead."""
BESIDE = {"kda": ("short_conv", "gated_rms_norm")}
"""Operator → those that run beside it in the same region."""
NOT_NORMS_OF_TOKENS = ("q_norm", "k_norm", "kv_a_layernorm")
"""Norms on heads, and one that reads part of what its projection gives: ``rms_norm`` takes whole rows."""
WITHOUT = {"Qwen3MoeConfig": ("kda",), "KimiLinearConfig": ("qk_norm_rope",)}
"""Operators that a family has no place for."""
PRE_NORM = {
    "first_norm": "input_layernorm",
    "branch": "self_attn",
    "norm": "post_attention_layernorm",
    "mlp": "mlp",
}
"""Children of a pre-norm layer by role."""
DELTA = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "conv_weight": "conv1d.weight",
    "decay": "forget_gate.f_b_proj",
    "decay_low": "forget_gate.f_a_proj",
    "a_log": "forget_gate.A_log",
    "dt_bias": "forget_gate.dt_bias",
    "beta": "b_proj",
    "gate": "g_b_proj",
    "gate_low": "g_a_proj",
    "norm_weight": "o_norm.weight",
    "o": "o_proj",
}
"""Parts of Kimi's linear attention by role."""


def with_beside(names: tuple[str, ...]) -> tuple[str, ...]:
    """Every operator that runs where these are named."""
    return tuple(one for name in names for one in (name, *BESIDE.get(name, ())))


def decisions_for(model: nn.Module, fusions: tuple[str, ...]) -> tuple[FusionDecision, ...]:
    """What a plan for this model would decide, for the named operators."""
    register(with_beside(fusions))
    layers = _layers(model)
    taken = layers if "add_rms_norm" in fusions else {}
    made = {
        "moe_layer": _experts(model, "moe_layer"),
        "grouped_lora_mlp": _experts(model, "grouped_lora_mlp"),
        "router": _router(model),
        "rms_norm": _norms(model, tuple(f"{name}.{PRE_NORM['norm']}" for name in taken)),
        "add_rms_norm": _pre_norm(layers),
        "qk_norm_rope": _attention(model),
        "kda": _kda(model),
        "linear_cross_entropy": decision("linear_cross_entropy", ("lm_head",), {"weight": "weight"}, {}),
    }
    chosen = [made[name] for name in fusions]
    return tuple(one for one in chosen if one is not None)


def register(names: tuple[str, ...]) -> None:
    """Operators in the kernels room that the registry does not admit yet are timed all the same."""
    for name in names:
        if name not in OPERATORS and (Path(ROOM) / name / "op.py").is_file():
            OPERATORS[name] = OperatorEntry(name, name, f"{name}.op:{name}", f"{name}.cost:cost", "", ())


def decision(op: str, modules: tuple[str, ...], roles: dict[str, str], constants: dict[str, Any]) -> FusionDecision:
    """One decision for an operator of ours, at its present source."""
    return FusionDecision(
        proposal_id=f"bench.{op}",
        pattern=op,
        variant="fused",
        provider="shardwright",
        op=op,
        modules=modules,
        roles=roles,
        constants=constants,
        source_sha256=source_sha256(op) if op in OPERATORS else None,
        beside={other: source_sha256(other) for other in BESIDE.get(op, ()) if other in OPERATORS},
        tolerance="0.02",
    )


def epsilon(norm: Any) -> str:
    """A norm's epsilon as a decision has it."""
    value = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return f"{float(value):.12f}".rstrip("0")


def _named(model: nn.Module, kind: str) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ == kind}


def _experts(model: nn.Module, op: str) -> FusionDecision | None:
    names = tuple(name for name, module in model.named_modules() if isinstance(module, LoraExperts))
    return decision(op, names, {}, {"activation": "swiglu"}) if names else None


def _norms(model: nn.Module, taken: tuple[str, ...]) -> FusionDecision | None:
    """Norms over whole rows of tokens, but those that another operator makes."""
    plain: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("RMSNorm")
        and name.rsplit(".", 1)[-1] not in NOT_NORMS_OF_TOKENS
        and name not in taken
    }
    if not plain:
        return None
    eps = epsilon(next(iter(plain.values())))
    same = tuple(name for name, module in plain.items() if epsilon(module) == eps)
    return decision("rms_norm", same, {"weight": "weight"}, {"eps": eps})


def _router(model: nn.Module) -> FusionDecision | None:
    """Routers of Qwen3 (softmax in the format of the logits) and of Kimi (sigmoid in fp32, a bias that picks)."""
    if found := _named(model, "Qwen3MoeTopKRouter"):
        gate = next(iter(found.values()))
        constants = {"k": int(gate.top_k), "scoring": "softmax", "renormalise": bool(gate.norm_topk_prob)}
        return decision("router", tuple(found), {"weight": "weight"}, constants)
    found = _named(model, "KimiLinearTopkRouter")
    if not found:
        return None
    gate = next(iter(found.values()))
    constants = {
        "k": int(gate.top_k),
        "scoring": "sigmoid",
        "groups": int(gate.num_group),
        "groups_kept": int(gate.topk_group),
        "group_score": "top2",
        "renormalise": bool(gate.norm_topk_prob),
        "scale": str(gate.routed_scaling_factor),
        "logits_dtype": "float32",
        "weights_dtype": "float32",
    }
    return decision("router", tuple(found), {"weight": "weight", "bias": "e_score_correction_bias"}, constants)


def _layers(model: nn.Module) -> dict[str, Any]:
    """Name → pre-norm layer without further children."""
    children = set(PRE_NORM.values())
    return {
        name: layer for name, layer in decoder_layers(model).items() if set(dict(layer.named_children())) == children
    }


def _pre_norm(layers: dict[str, Any]) -> FusionDecision | None:
    if not layers:
        return None
    eps = epsilon(next(iter(layers.values())).post_attention_layernorm)
    return decision("add_rms_norm", tuple(layers), dict(PRE_NORM), {"eps": eps})


def _attention(model: nn.Module) -> FusionDecision | None:
    """Attentions with a norm on each head."""
    found = {name: module for name, module in model.named_modules() if hasattr(module, "q_norm")}
    norms: list[Any] = [module.q_norm for module in found.values()]
    return decision("qk_norm_rope", tuple(found), {}, {"eps": epsilon(norms[0])}) if norms else None


def _kda(model: nn.Module) -> FusionDecision | None:
    """Whole linear-attention layers between their projections."""
    found = _named(model, "KimiLinearDeltaAttention")
    if not found:
        return None
    layer = next(iter(found.values()))
    constants = {
        "form": "channels",
        "heads": int(layer.num_heads),
        "value_heads": int(layer.num_heads),
        "key_width": int(layer.head_dim),
        "value_width": int(layer.head_dim),
        "gate": "softplus",
        "act": str(layer.o_norm.activation),
        "eps": epsilon(layer.o_norm),
        "operators": " ".join(with_beside(("kda",))),
    }
    return decision("kda", tuple(found), dict(DELTA), constants)
