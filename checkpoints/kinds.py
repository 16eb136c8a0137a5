"""Layers that are built alike, and what they are built of."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from shardwright.checkpoints.config import ModelConfig
from shardwright.checkpoints.counting import Counter, Layer
from shardwright.schemas.profile import LayerKind

Attention = Literal["full", "sliding", "mla", "linear", "dsa", "none"]
Mlp = Literal["moe", "dense", "none"]

ATTENTION_NAME: dict[Attention, str] = {
    "full": "attention",
    "sliding": "sliding-attention",
    "mla": "mla",
    "linear": "linear-attention",
    "dsa": "dsa",
    "none": "none",
}


def layer_kinds(counter: Counter, config: ModelConfig) -> tuple[LayerKind, ...]:
    """Group layers by attention, MLP and size, in order of first appearance.

    Layers of one make but different sizes are different kinds (``attention+dense``, ``attention+dense#2``).
    Where a model has several stacks (encoder and decoder), layers are numbered through, stack by stack.
    """
    groups: dict[tuple[Attention, Mlp, int, int], list[int]] = defaultdict(list)
    places = sorted(counter.layers, key=lambda place: (place[0], place[1]))
    for number, place in enumerate(places):
        layer = counter.layers[place]
        index = place[1] if len({stem for stem, _ in places}) == 1 else number
        key = (attention_of(layer, index, config), mlp_of(layer), sum(layer.weights.values()), _experts(layer))
        groups[key].append(index)
    kinds = []
    seen: dict[str, int] = defaultdict(int)
    for (attention, mlp, parameters, experts), indices in groups.items():
        base = f"{ATTENTION_NAME[attention]}+{mlp}"
        seen[base] += 1
        kinds.append(
            LayerKind(
                name=base if seen[base] == 1 else f"{base}#{seen[base]}",
                attention=attention,
                mlp=mlp,
                layer_indices=tuple(indices),
                parameters=parameters,
                expert_parameters=experts,
            )
        )
    return tuple(kinds)


def _experts(layer: Layer) -> int:
    return layer.weights.get("routed_experts", 0)


def attention_of(layer: Layer, index: int, config: ModelConfig) -> Attention:
    """Told by tensors (indexer, recurrent state, latent projections); sliding or full by the configuration."""
    if layer.weights.get("indexer"):
        return "dsa"
    if layer.weights.get("linear_attention"):
        return "linear"
    if not layer.weights.get("attention"):
        return "none"
    if any("kv_a_proj" in mark or "kv_a_layernorm" in mark for mark in layer.marks):
        return "mla"
    return "sliding" if _slides(index, config) else "full"


def _slides(index: int, config: ModelConfig) -> bool:
    types = config.get("layer_types")
    if isinstance(types, list) and index < len(types):
        return types[index] in ("sliding_attention", "chunked_attention")
    return config.get("sliding_window") is not None and config.get("use_sliding_window", default=True) is True


def mlp_of(layer: Layer) -> Mlp:
    """A layer with routed experts is ``moe`` even if a dense MLP stands beside them."""
    if layer.weights.get("routed_experts"):
        return "moe"
    return "dense" if layer.weights.get("dense_mlp") else "none"
