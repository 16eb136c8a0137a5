"""The models and points that the cost model is held against on one device: full width, few layers, random weights.

A case is written ``MODEL-NLAYERS/TARGETS/tTOKENS/bBATCH/CHECKPOINTING/EXECUTOR``: ``qwen3-30b-6layers/attention/t4096/
b1/full/eager``. ``eager`` runs the family's own modules under our adapters and experts; ``fused`` installs the
operators in ``Shape.fused``. Layer counts are part of the case, never scaled away.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from train_step_cases import KIMI_LINEAR_48B, QWEN3_30B

RANK, ALPHA = 16, "32"

GLM_5: dict[str, Any] = {
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "vocab_size": 154880,
    "tie_word_embeddings": False,
}
"""GLM-5 without its MTP layer; the first of a cut model's layers is dense."""

TINY: dict[str, dict[str, Any]] = {
    "qwen3-30b": {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 48, "vocab_size": 256,
    },
    "kimi-linear-48b": {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48,
        "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_token": 2, "vocab_size": 256,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "glm-5": {
        "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_attention_heads": 4,
        "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 8,
        "index_head_dim": 8, "index_n_heads": 2, "vocab_size": 256,
    },
}  # fmt: skip
"""Overrides of a self-test: the same families, a few thousand parameters."""


@dataclass(frozen=True)
class Shape:
    """One model at full width.

    Attributes:
        fused: operators that a fused point installs, of those the family's layers have a place for.
    """

    config_class: str
    config: dict[str, Any]
    fused: tuple[str, ...]

    def hf_config(self, layers: int, overrides: dict[str, Any] | None = None) -> Any:
        """A configuration object of transformers with that many layers."""
        import transformers

        values = {**self.config, **(overrides or {}), "num_hidden_layers": layers}
        linear = values.get("linear_attn_config")
        if linear is not None:
            if overrides:
                linear = {**linear, "head_dim": 8, "num_heads": 4}
            kept = {key: [n for n in linear[key] if n <= layers] for key in ("full_attn_layers", "kda_layers")}
            values["linear_attn_config"] = {**linear, **kept}
        if self.config_class == "GlmMoeDsaConfig":
            values["mlp_layer_types"] = ["dense"] + ["sparse"] * (layers - 1)
        return getattr(transformers, self.config_class)(**values)


SHAPES: dict[str, Shape] = {
    "qwen3-30b": Shape(
        "Qwen3MoeConfig",
        QWEN3_30B,
        ("moe_layer", "router", "rms_norm", "add_rms_norm", "qk_norm_rope", "linear_cross_entropy"),
    ),
    "kimi-linear-48b": Shape("KimiLinearConfig", KIMI_LINEAR_48B, ("moe_layer", "rms_norm", "linear_cross_entropy")),
    "glm-5": Shape("GlmMoeDsaConfig", GLM_5, ("moe_layer", "rms_norm", "linear_cross_entropy")),
}

CASE = re.compile(
    r"^(?P<model>[a-z0-9.-]+?)-(?P<layers>\d+)layers/(?P<targets>[\w+]+)/t(?P<tokens>\d+)/b(?P<batch>\d+)"
    r"/(?P<how>none|full)/(?P<executor>eager|fused)$"
)


@dataclass(frozen=True, order=True)
class Point:
    """One measured step."""

    executor: str
    model: str
    targets: tuple[str, ...]
    layers: int
    tokens: int
    batch: int
    how: str
    overrides: tuple[tuple[str, Any], ...] = field(default=(), compare=False)

    @property
    def case(self) -> str:
        return (
            f"{self.model}-{self.layers}layers/{'+'.join(self.targets)}/t{self.tokens}/b{self.batch}"
            f"/{self.how}/{self.executor}"
        )

    @property
    def built(self) -> tuple[str, str, tuple[str, ...], int]:
        """Points that share one built model."""
        return self.executor, self.model, self.targets, self.layers

    @property
    def fusions(self) -> tuple[str, ...]:
        return SHAPES[self.model].fused if self.executor == "fused" else ()

    def hf_config(self) -> Any:
        return SHAPES[self.model].hf_config(self.layers, dict(self.overrides))


def read_case(case: str) -> Point | None:
    """The point that a case names; ``None`` where it names none."""
    match = CASE.match(case)
    if match is None or match["model"] not in SHAPES:
        return None
    return Point(
        match["executor"],
        match["model"],
        tuple(match["targets"].split("+")),
        int(match["layers"]),
        int(match["tokens"]),
        int(match["batch"]),
        match["how"],
    )


BOTH = ("attention", "experts")
LAYERS = {"qwen3-30b": 6, "kimi-linear-48b": 4, "glm-5": 3}
"""Layers of a measured model: Kimi-Linear's first four hold three linear and one latent attention."""

_EAGER: dict[str, dict[tuple[str, ...], tuple[tuple[int, int, str], ...]]] = {
    "qwen3-30b": {
        ("attention",): ((2048, 1, "none"), (4096, 1, "full"), (8192, 1, "none"), (32768, 1, "full")),
        ("experts",): ((2048, 1, "none"), (4096, 1, "none"), (8192, 1, "full")),
        BOTH: ((2048, 1, "full"), (4096, 1, "none"), (4096, 2, "full"), (8192, 1, "full"), (16384, 1, "full")),
    },
    "glm-5": {
        ("attention",): ((2048, 1, "none"), (4096, 1, "full")),
        ("experts",): ((2048, 1, "none"), (4096, 1, "full")),
        BOTH: ((2048, 1, "full"), (4096, 1, "none"), (8192, 1, "full")),
    },
    "kimi-linear-48b": {
        ("attention",): ((2048, 1, "none"), (4096, 1, "full")),
        ("experts",): ((2048, 1, "none"), (2048, 1, "full")),
        BOTH: ((2048, 1, "none"), (4096, 1, "full")),
    },
}
_FUSED: dict[str, dict[tuple[str, ...], tuple[tuple[int, int, str], ...]]] = {
    "qwen3-30b": {
        BOTH: ((4096, 1, "none"), (8192, 1, "full"), (16384, 1, "none"), (32768, 1, "full")),
        ("attention",): ((4096, 1, "full"), (16384, 1, "none")),
    },
    "glm-5": {BOTH: ((2048, 1, "none"), (4096, 1, "full"))},
    "kimi-linear-48b": {BOTH: ((2048, 1, "none"), (4096, 1, "full"))},
}


WHOLE = tuple(Point("fused", "qwen3-30b", targets, 48, 4096, 4, "full") for targets in (BOTH, ("attention",)))
"""The whole model: far from the cut ones in size, and dominated by its layers, where head and loss dominate theirs."""

_LATER = {("experts",): 2, ("attention",): 2}
"""Groups that come after those that adapt both, eager and fused, of every model."""


def points(models: tuple[str, ...] = (), executors: tuple[str, ...] = ("eager", "fused")) -> list[Point]:
    """All points in measuring order: points of one built model stand together, and a run that is cut short has seen
    every model, eager and fused, before it comes to the groups of one kind of adapters."""
    groups: list[tuple[int, list[Point]]] = []
    for place, (executor, table) in enumerate((("eager", _EAGER), ("fused", _FUSED))):
        for model, of_model in table.items():
            if executor not in executors or (models and model not in models):
                continue
            for targets, rows in of_model.items():
                found = [Point(executor, model, targets, LAYERS[model], *row) for row in rows]
                groups.append((_LATER.get(targets, place), found))
    whole = [point for point in WHOLE if point.executor in executors and (not models or point.model in models)]
    groups += [(1, [point]) for point in whole]
    return [point for _, found in sorted(groups, key=lambda group: group[0]) for point in found]


def tiny_points(fused: bool = False) -> list[Point]:
    """The same families in miniature, for any device; fused ones, shorter still, for one that runs the kernels."""
    found = [
        Point("eager", model, targets, LAYERS[model], 64, 1, how, tuple(TINY[model].items()))
        for model in SHAPES
        for targets in (("attention",), BOTH)
        for how in ("none", "full")
    ]
    if fused:
        found += [Point("fused", model, BOTH, 2, 8, 1, "full", tuple(TINY[model].items())) for model in SHAPES]
    return found
