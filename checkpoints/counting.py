"""Exact parameter counts from headers: logical weights by component, buffers and multi-token prediction apart."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

from shardwright.checkpoints.components import LINEAR_MARKS, component_of, split_layer
from shardwright.checkpoints.config import ModelConfig
from shardwright.checkpoints.headers import Headers
from shardwright.checkpoints.packing.dtypes import FP8, PLAIN
from shardwright.checkpoints.packing.logical import LogicalTensor
from shardwright.schemas.profile import ActiveCounts, Component, ModelShape, ParameterCounts

_BUFFER = re.compile(
    r"(e_score_correction_bias|expert_bias|router_bias|balancing_biases|inv_freq|layer_scalar)$|moe_statics\."
    r"|self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"
)
_GATE_BIAS = re.compile(r"\.(ffn|mlp)\.gate\.bias$")
GATE_BIAS_IS_CORRECTION = frozenset(
    {"deepseek_v3", "deepseek_v32", "deepseek_v4", "inkling", "inkling2", "inkling2_loop"}
)
"""Families whose own files call the selection bias ``gate.bias``."""
TRAINED_ROUTER_BIAS = frozenset({"afmoe", "ernie4_5_moe", "ernie4_5_vl_moe", "laguna"})
"""Families whose class declares the router's selection bias as a parameter; everywhere else it is a buffer."""

_DIGITS = re.compile(r"\d+")
_NOT_TEXT: frozenset[Component] = frozenset({"vision", "projector"})


@dataclass(frozen=True, slots=True)
class Counted:
    """One logical tensor with its place.

    Attributes:
        layer: number of its decoder layer, or -1.
        weights: parameters in it.
        buffers: values in it that are not parameters.
    """

    name: str
    component: Component
    layer: int
    weights: int
    buffers: int


@dataclass
class Layer:
    """What one decoder layer holds."""

    weights: dict[Component, int] = field(default_factory=lambda: defaultdict(int))
    marks: set[str] = field(default_factory=set)
    """Last parts of the names of its attention tensors."""


class Counter:
    """Counts a checkpoint once; :meth:`parameters` and :attr:`layers` give the results.

    Args:
        logical: all weights, packing undone.
        headers: the file tensors behind them.
        config, shape: the configuration and its sizes.
    """

    def __init__(
        self, logical: dict[str, LogicalTensor], headers: Headers, config: ModelConfig, shape: ModelShape
    ) -> None:
        self._logical, self._headers, self._config, self._shape = logical, headers, config, shape
        self._components: dict[tuple[str, int, bool], Component] = {}
        self.by_component: dict[Component, int] = defaultdict(int)
        self.buffers = 0
        self.layers: dict[tuple[str, int], Layer] = defaultdict(Layer)
        self.heads: list[str] = []
        self.embeddings: list[str] = []
        for counted in self._walk():
            self.by_component[counted.component] += counted.weights
            self.buffers += counted.buffers

    @property
    def tied(self) -> tuple[tuple[str, str], ...]:
        """(head, embedding) when one matrix serves as both."""
        if self.embeddings and self._config.tie_word_embeddings:
            head = self.heads[0] if self.heads else "lm_head.weight"
            return ((head, self.embeddings[0]),)
        return ()

    def parameters(self) -> ParameterCounts:
        """Totals and active counts.

        Active counts hold for a text token: all weights but those of vision, projector and prediction layers, with
        routed experts · top-k / E. A tied matrix still multiplies as the head, so ``without_input_embedding`` keeps
        it and ``without_embeddings`` drops it.
        """
        by = self.by_component
        total = sum(count for component, count in by.items() if component != "mtp")
        routed = by["routed_experts"]
        used = routed * self._shape.experts_per_token // self._shape.num_experts if self._shape.num_experts else routed
        active = total - routed + used - sum(by[component] for component in _NOT_TEXT)
        tied = bool(self.tied)
        return ParameterCounts(
            total=total,
            mtp=by["mtp"],
            buffers=self.buffers,
            active=ActiveCounts(
                all=active,
                without_input_embedding=active if tied else active - by["embedding"],
                without_embeddings=active - by["embedding"] - by["head"],
            ),
            by_component={component: count for component, count in sorted(by.items()) if count},
        )

    def weights_of(self, names: Iterable[str]) -> int:
        """Parameters of some tensors, those of MTP layers left out."""
        return sum(self._values(name, self._logical[name])[0] for name in names if not self._beyond(name))

    def _beyond(self, name: str) -> bool:
        component, place = self._component(name, len(self._logical[name].shape), False), split_layer(name)
        later = place is not None and component not in _NOT_TEXT and place[1] >= self._shape.num_layers
        return component == "mtp" or later

    def _walk(self) -> Iterator[Counted]:
        linear = self._linear_layers()
        for name, tensor in self._logical.items():
            place = split_layer(name)
            component = self._component(name, len(tensor.shape), place is not None and place[:2] in linear)
            if place is not None and component not in _NOT_TEXT and component != "mtp":
                if place[1] >= self._shape.num_layers:
                    component = "mtp"
                else:
                    layer = self.layers[place[:2]]
                    if component in ("attention", "linear_attention", "indexer"):
                        layer.marks.add(place[2])
            weights, buffers = self._values(name, tensor)
            if self._is_tied_copy(name, component):
                weights = 0
            if component == "mtp":
                buffers = 0
            elif place is not None and component not in _NOT_TEXT:
                self.layers[place[:2]].weights[component] += weights
            yield Counted(name, component, place[1] if place else -1, weights, buffers)

    def _linear_layers(self) -> set[tuple[str, int]]:
        """Layers with a recurrent state: told by their tensors, or named so in ``layer_types``."""
        types = self._config.get("layer_types")
        named = {i for i, kind in enumerate(types) if kind == "linear_attention"} if isinstance(types, list) else set()
        found = set()
        for name in self._logical:
            marked = LINEAR_MARKS.search(name) is not None
            if (marked or named) and (place := split_layer(name)) is not None and (marked or place[1] in named):
                found.add(place[:2])
        return found

    def _component(self, name: str, rank: int, linear: bool) -> Component:
        """Memoised over layer and expert numbers: half a million names have a few hundred forms."""
        key = (_DIGITS.sub("0", name), rank, linear)
        found = self._components.get(key)
        if found is None:
            found = self._components[key] = component_of(name, rank, linear_layer=linear)
        return found

    def _values(self, name: str, tensor: LogicalTensor) -> tuple[int, int]:
        """(parameters, other values) of one tensor."""
        size = prod(tensor.shape)
        dtype = self._headers.tensors[tensor.values].dtype
        if tensor.format == "plain" and dtype not in PLAIN and dtype not in FP8:
            return 0, size
        family = self._config.text_model_type.removesuffix("_text")
        if _BUFFER.search(name) and family not in TRAINED_ROUTER_BIAS:
            return 0, size
        if family in GATE_BIAS_IS_CORRECTION and _GATE_BIAS.search(name):
            return 0, size
        if name.endswith(".A_log") and len(tensor.shape) == 1:
            heads = _linear_heads(self._config)
            if 0 < heads < size:
                return heads, size - heads
        return size, 0

    def _is_tied_copy(self, name: str, component: Component) -> bool:
        if component == "embedding":
            self.embeddings.append(name)
        if component == "head":
            self.heads.append(name)
            return self._config.tie_word_embeddings and name.endswith(".weight")
        return False


def _linear_heads(config: ModelConfig) -> int:
    """Heads of the recurrent attention, where the configuration has a group for it."""
    group = config.get("linear_attn_config")
    heads = group.get("num_heads") if isinstance(group, dict) else None
    return heads if isinstance(heads, int) and not isinstance(heads, bool) else 0
