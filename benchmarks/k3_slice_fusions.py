"""What a plan would decide for a slice, written out by the classes of modules: operators, parts by role, numbers.

Experts, routers, norms, delta-rule layers as a whole, gated latent attention, sparse attention, the loss.
Legend: H hidden.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from train_step_decisions import decision, epsilon, register

from shardwright.kernels.registry import source_sha256
from shardwright.runtime.experts.module import LoraExperts
from shardwright.schemas.fusion import FusionDecision

SPARSE = {"GlmMoeDsaAttention": ("interleaved", True), "DeepseekV32Attention": ("half-split", False)}
"""Class → how its indexer rotates, and whether it hands its choice on to the next layer."""
LATENT_ROLES = {
    "q_a": "q_a_proj", "q_norm": "q_a_layernorm", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm", "kv_b_weight": "kv_b_proj.weight", "o": "o_proj",
}  # fmt: skip
INDEXER_ROLES = {
    "index_q": "indexer.wq_b", "index_k": "indexer.wk", "index_norm": "indexer.k_norm",
    "index_weights": "indexer.weights_proj",
}  # fmt: skip
DELTA_ROLES = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "q_conv_weight": "q_conv1d.weight", "k_conv_weight": "k_conv1d.weight",
    "v_conv_weight": "v_conv1d.weight", "decay": "f_b_proj", "decay_low": "f_a_proj", "a_log": "A_log",
    "dt_bias": "dt_bias", "beta": "b_proj", "gate": "g_proj", "norm_weight": "o_norm.weight", "o": "o_proj",
}  # fmt: skip
PART_OF_A_PROJECTION = "kv_a_layernorm"
"""A norm whose rows lie in wider ones: ``rms_norm`` takes dense rows, and no plan gives it others."""
DELTA_OPERATORS = ("kda", "short_conv", "gated_rms_norm")


def decisions(model: nn.Module, fusions: tuple[str, ...]) -> tuple[FusionDecision, ...]:
    """What a plan for this model would decide, for the named operators; those without a place are left out."""
    register(fusions)
    makers = {
        "experts": _experts,
        "router": _routers,
        "rms_norm": _norms,
        "attention_residual": _mixes,
        "kda": _delta_rules,
        "mla": _gated_latent,
        "dsa": _sparse,
        "linear_cross_entropy": _loss,
    }
    unknown = [name for name in fusions if name not in makers]
    if unknown:
        raise SystemExit(f"unknown fusions: {', '.join(unknown)}; known: {', '.join(makers)}")
    return tuple(one for name in fusions for one in makers[name](model))


def named(model: nn.Module, *classes: str) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ in classes}


def _experts(model: nn.Module) -> list[FusionDecision]:
    found = {name: module for name, module in model.named_modules() if isinstance(module, LoraExperts)}
    if not found:
        return []
    first: Any = next(iter(found.values()))
    constants: dict[str, Any] = {"activation": "swiglu"}
    text: Any = getattr(model.config, "text_config", model.config)
    if hasattr(text, "activation_situ_beta"):
        beta, linear = text.activation_situ_beta, text.activation_situ_linear_beta
        constants = {"activation": "situ", "limit": f"{beta:g}", "alpha": f"{linear:g}", "offset": "0"}
    return [decision("packed_experts" if first.packing else "moe_layer", tuple(found), {}, constants)]


def _routers(model: nn.Module) -> list[FusionDecision]:
    """Routers that give scores, weights and ids themselves: Kimi K3's."""
    found = named(model, "Router")
    if not found:
        return []
    gate = next(iter(found.values()))
    constants = {
        "k": gate.top_k, "scoring": "sigmoid", "renormalise": gate.renormalise, "scale": f"{gate.scale:g}",
        "logits_dtype": "float32",
    }  # fmt: skip
    return [decision("router", tuple(found), {"weight": "weight", "bias": "e_score_correction_bias"}, constants)]


def _norms(model: nn.Module) -> list[FusionDecision]:
    """Plain norms of dense rows, one decision an epsilon."""
    by_epsilon: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        kind, last = type(module).__name__, name.rsplit(".", 1)[-1]
        if kind.endswith("RMSNorm") and "Gated" not in kind:
            if last == PART_OF_A_PROJECTION:
                continue
            by_epsilon.setdefault(epsilon(module), []).append(name)
    return [
        decision("rms_norm", tuple(names), {"weight": "weight"}, {"eps": eps})
        for eps, names in sorted(by_epsilon.items())
    ]


def _mixes(model: nn.Module) -> list[FusionDecision]:
    """Kimi K3's mixes of residual rows."""
    found = named(model, "ResidualMix")
    if not found:
        return []
    constants = {"form": "scored", "eps": epsilon(next(iter(found.values())))}
    return [decision("attention_residual", tuple(found), {"norm": "weight"}, constants)]


def _delta_rules(model: nn.Module) -> list[FusionDecision]:
    """Kimi K3's delta-rule layers from projection to projection: convolutions, recurrence with its gates, norm."""
    found = named(model, "DeltaAttention")
    if not found:
        return []
    first = next(iter(found.values()))
    heads, width = first.heads, first.width
    constants = {
        "heads": heads, "value_heads": heads, "key_width": width, "value_width": width, "form": "channels",
        "gate": "bounded", "lower_bound": f"{first.lower_bound:g}", "eps": epsilon(first.o_norm), "act": "sigmoid",
        "operators": " ".join(DELTA_OPERATORS),
    }  # fmt: skip
    made = decision("kda", tuple(found), DELTA_ROLES, constants)
    return [made.model_copy(update={"beside": {op: source_sha256(op) for op in DELTA_OPERATORS[1:]}})]


def _gated_latent(model: nn.Module) -> list[FusionDecision]:
    """Kimi K3's full attention over all keys: a library's, with our gate."""
    found = named(model, "GatedLatentAttention")
    if not found:
        return []
    config: Any = model.config
    sizes = {**_latent_sizes(config.text_config), "layout": "none", "top_k": 0, "form": "dense", "call": "mask"}
    return [decision("dsa", tuple(found), {**LATENT_ROLES, "gate": "g_proj"}, sizes)]


def _sparse(model: nn.Module) -> list[FusionDecision]:
    """One decision a class of sparse attention."""
    found = []
    for kind, (layout, hands_on) in SPARSE.items():
        if modules := named(model, kind):
            own = {"layout": "interleaved", "index_layout": layout, "hands_on": hands_on}
            roles = {**LATENT_ROLES, **INDEXER_ROLES}
            found.append(decision("dsa", tuple(modules), roles, {**_sparse_sizes(model.config), **own}))
    if modules := named(model, "GatedSparseAttention"):
        config: Any = model.config
        own = {"layout": "none", "index_layout": "none", "call": "mask"}
        roles = {**LATENT_ROLES, **INDEXER_ROLES, "gate": "g_proj"}
        found.append(decision("dsa", tuple(modules), roles, {**_sparse_sizes(config.text_config), **own}))
    return found


def _latent_sizes(config: Any) -> dict[str, Any]:
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    return {"nope": nope, "rope": rope, "value": config.v_head_dim, "scale": f"{(nope + rope) ** -0.5:.12f}"}


def _sparse_sizes(config: Any) -> dict[str, Any]:
    return {
        **_latent_sizes(config), "top_k": config.index_topk, "form": "own", "index_first": True,
        "index_scale": f"{(config.index_n_heads * config.index_head_dim) ** -0.5:.12f}",
    }  # fmt: skip


def _loss(model: nn.Module) -> list[FusionDecision]:
    head = next(name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] == "lm_head")
    return [decision("linear_cross_entropy", (head,), {"weight": "weight"}, {})]
