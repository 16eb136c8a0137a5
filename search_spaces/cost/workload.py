"""What one model with its adapters asks of a rank, before any mesh is chosen.

Legend: T tokens, H hidden, I expert width, E experts, K experts per token, V vocabulary, n heads,
d head dim, b bytes per computed value, r LoRA rank.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from shardwright.kernels.guards import BYTES
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointProfile, LayerKind
from shardwright.schemas.recipe import Recipe
from shardwright.search_spaces.cost.routing import Loads

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SECOND = re.compile(r"(^|[._])(o|out|down|w2|dense|wo)(_proj)?($|[._])")
"""Names of the projection that ends a block: its input is the block's inner tensor."""


@dataclass(frozen=True)
class Adapters:
    """LoRA on one layer (mean over its kind), or on the root."""

    dense_parameters: float = 0.0
    expert_parameters: float = 0.0
    dense_ranks: float = 0.0
    """Sum of r over dense targets: values per token kept for backward."""
    expert_ranks: float = 0.0
    dense_traffic: float = 0.0
    """Values per token that dense adapters move forward: in + 2r + 3·out each."""
    expert_traffic: float = 0.0
    dense_features: float = 0.0
    """Sum of r·(in + out) over dense targets: half the flops per token forward."""
    expert_features: float = 0.0
    attention_widths: float = 0.0
    """Widths of what the adapted projections of attention read, the one that ends the block left out, each once."""
    attention_out: bool = False
    experts_in: bool = False
    experts_out: bool = False
    mlp_in: bool = False
    mlp_out: bool = False
    targets: float = 0.0


@dataclass(frozen=True)
class LayerWork:
    """Layers that are built alike."""

    kind: LayerKind
    dense_parameters: int
    """Of one layer, without routed experts."""
    expert_parameters: int
    mlp_width: int
    """Width of the dense MLP, or of all shared experts together; 0 for none."""
    adapters: Adapters
    silent: int = 0
    """Layers of this kind before the first adapter of the model: nothing flows back through them."""
    headless: bool = False
    """Whether the model's first adapter stands in a layer of this kind, behind its attention."""

    @property
    def count(self) -> int:
        return len(self.kind.layer_indices)

    @property
    def routed(self) -> bool:
        return self.expert_parameters > 0


@dataclass(frozen=True)
class Workload:
    """Sizes that every cost term reads."""

    profile: CheckpointProfile
    recipe: Recipe
    layers: tuple[LayerWork, ...]
    root_parameters: int
    """Embedding, head, final norm and whatever stands outside the layers."""
    root_adapters: Adapters
    adapter_dense_parameters: int
    adapter_expert_parameters: int
    dtype: str
    base_bytes: int
    adapter_bytes: int
    loads: Loads = ()
    """Measured share of rows by MoE layer and expert; empty: a stated prior."""
    known: dict[Hashable, float] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What was computed of this model once, for all plans."""

    @property
    def hidden(self) -> int:
        return self.profile.shape.hidden_size

    @property
    def vocabulary(self) -> int:
        return self.profile.shape.vocab_size

    @property
    def expert_total(self) -> int:
        """Routed-expert parameters of the whole model."""
        return sum(layer.expert_parameters * layer.count for layer in self.layers)

    @property
    def dense_total(self) -> int:
        """All other parameters."""
        return self.root_parameters + sum(layer.dense_parameters * layer.count for layer in self.layers)

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys have norms of their own, beside the two norms of hidden width of a layer."""
        shape, layers = self.profile.shape, self.profile.shape.num_layers
        if any(layer.kind.attention not in ("full", "sliding") for layer in self.layers):
            return False
        projections = 2 * self.hidden * (self.query_width + self.key_width)
        beyond = self.profile.parameters.by_component.get("attention", 0) - layers * projections
        biases = self.query_width + 2 * self.key_width
        return beyond > 0 and beyond not in (layers * biases, layers * (biases + shape.hidden_size))

    @property
    def query_width(self) -> int:
        return self.profile.shape.num_attention_heads * self.profile.shape.head_dim

    @property
    def key_width(self) -> int:
        return self.profile.shape.num_key_value_heads * self.profile.shape.head_dim

    @property
    def row_width(self) -> int:
        """Width of a routed row: the latent width where experts have one."""
        return self.profile.shape.expert_hidden_size or self.hidden

    @property
    def linear_width(self) -> int:
        """n·d of linear attention."""
        shape = self.profile.shape
        return (shape.linear_num_heads or shape.num_attention_heads) * (shape.linear_head_dim or shape.head_dim)

    def latent(self, layer: LayerWork) -> bool:
        """Whether the layer's attention compresses keys and values."""
        return layer.kind.attention in ("mla", "dsa") and self.profile.shape.kv_lora_rank > 0


def workload(profile: CheckpointProfile, recipe: Recipe, targets: Sequence[LoraTarget], loads: Loads = ()) -> Workload:
    """Count a model once; every strategy is priced from this."""
    shape = profile.shape
    first, behind = _first_adapter(targets)
    layers = tuple(
        LayerWork(
            kind=kind,
            dense_parameters=kind.parameters - kind.expert_parameters,
            expert_parameters=kind.expert_parameters,
            mlp_width=shape.dense_intermediate_size
            if kind.mlp == "dense"
            else shape.num_shared_experts * shape.expert_intermediate_size,
            adapters=_adapters(
                [t for t in targets if _layer_of(t) in kind.layer_indices], len(kind.layer_indices), shape.num_experts
            ),
            silent=sum(index < first for index in kind.layer_indices),
            headless=behind and first in kind.layer_indices,
        )
        for kind in profile.layer_kinds
    )
    inside = sum(layer.kind.parameters * layer.count for layer in layers)
    adapter_dense = sum(t.adapter_parameters for t in targets if not _of_experts(t))
    return Workload(
        profile=profile,
        recipe=recipe,
        layers=layers,
        root_parameters=max(profile.parameters.total - inside, 0),
        root_adapters=_adapters([t for t in targets if _layer_of(t) is None], 1, shape.num_experts),
        adapter_dense_parameters=adapter_dense,
        adapter_expert_parameters=sum(t.adapter_parameters for t in targets) - adapter_dense,
        dtype=recipe.precision.base,
        base_bytes=BYTES[recipe.precision.base],
        adapter_bytes=BYTES[recipe.precision.adapter],
        loads=loads,
    )


def _first_adapter(targets: Sequence[LoraTarget]) -> tuple[int, bool]:
    """(first layer with an adapter, whether that stands behind its attention); layer 0 where nothing is known."""
    layers = [(index, target.role != "attention") for target in targets if (index := _layer_of(target)) is not None]
    if not layers or any(_layer_of(target) is None and "embed" in target.parameter for target in targets):
        return 0, False
    return min(layers)


def _layer_of(target: LoraTarget) -> int | None:
    match = _LAYER.search(f".{target.parameter}")
    return int(match.group(1)) if match else None


def _is_second(target: LoraTarget) -> bool:
    name = target.parameter.removesuffix(".weight").rsplit(".", 1)[-1]
    return bool(_SECOND.search(name))


def _routed(target: LoraTarget) -> bool:
    return target.kind == "experts" or target.role == "experts"


def _of_experts(target: LoraTarget) -> bool:
    """Whether its adapter is cut with the experts. A pair that they share lies with the dense weights."""
    return _routed(target) and not target.shared


def _adapters(targets: list[LoraTarget], layers: int, experts: int) -> Adapters:
    """Sums over the targets of ``layers`` layers, per layer.

    An adapter on one expert's own linear meets that expert's share of the rows only: 1/E of them.
    """
    dense = [t for t in targets if not _routed(t)]
    stacks = [t for t in targets if _routed(t)]
    attention = [t for t in dense if t.role == "attention"]
    mlp = [t for t in dense if t.role in ("dense_mlp", "shared_experts")]

    def total(values: list[float]) -> float:
        return sum(values) / layers

    def share(target: LoraTarget) -> float:
        return 1 / experts if target.kind == "dense" and _routed(target) else 1.0

    def ranks(group: list[LoraTarget]) -> float:
        return total([share(t) * t.rank for t in group])

    def features(group: list[LoraTarget]) -> float:
        return total([share(t) * t.rank * (t.in_features + t.out_features) for t in group])

    def traffic(group: list[LoraTarget]) -> float:
        return total([share(t) * (t.in_features + 2 * t.rank + 3 * t.out_features) for t in group])

    return Adapters(
        dense_parameters=total([t.adapter_parameters for t in targets if not _of_experts(t)]),
        expert_parameters=total([t.adapter_parameters for t in targets if _of_experts(t)]),
        dense_ranks=ranks(dense),
        expert_ranks=ranks(stacks),
        dense_traffic=traffic(dense),
        expert_traffic=traffic(stacks),
        dense_features=features(dense),
        expert_features=features(stacks),
        attention_widths=float(sum({t.in_features for t in attention if not _is_second(t)})),
        attention_out=any(_is_second(t) for t in attention),
        experts_in=any(not _is_second(t) for t in stacks),
        experts_out=any(_is_second(t) for t in stacks),
        mlp_in=any(not _is_second(t) for t in mlp),
        mlp_out=any(_is_second(t) for t in mlp),
        targets=len(targets) / layers,
    )
