"""Capture: one decoder layer of each kind, its experts' arithmetic, and the region around the layers.

``torch.export`` (non-strict) on meta tensors in training mode, then ``make_fx`` where that fails. A layer that neither
can trace becomes one opaque node with the reason; nothing is ever proposed inside it.

Legend: T tokens (batch × sequence), K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from shardwright.agents.structure.expert_body import body_of
from shardwright.agents.structure.kinds import KindGroup, group_layers
from shardwright.agents.structure.opaque import ExpertsCall, OpaqueExperts
from shardwright.agents.structure.opaque_indexers import opaque_indexers
from shardwright.agents.structure.opaque_loops import counted_cuts
from shardwright.agents.structure.opaque_rules import opaque_rules
from shardwright.agents.structure.skeleton import LayerInputs, find_layers, trace_skeleton
from shardwright.agents.structure.trace import TRACE_ERRORS, Traced, of_program, trace_call
from shardwright.schemas.errors import CheckpointError
from shardwright.schemas.profile import LayerKind

CAPTURE_ERRORS = TRACE_ERRORS
"""What tracing raises for code it cannot trace; each becomes an opaque node with its reason."""

EXPERTS_SUFFIX = "/experts"
HIDDEN = "hidden_states"
EXPERT_VALUES = (HIDDEN, "top_k_index", "top_k_weights")


@dataclass(frozen=True)
class CapturedGraph:
    """One traced region, flat, with the names of its leaves."""

    kind: str
    module_path: str
    """Of the captured instance; empty for the whole model."""
    occurrences: tuple[str, ...]
    module: nn.Module
    graph: fx.Graph | None
    leaves: dict[str, tuple[Literal["parameter", "buffer", "input"], str]] = field(default_factory=dict)
    """Placeholder → kind and name; parameters and buffers by fully qualified name."""
    capture: Literal["export", "make_fx", "opaque"] = "export"
    reason: str = ""
    call: ExpertsCall | None = None


class LayerCall(nn.Module):
    """One layer as a function of tensors alone; all other arguments are bound."""

    def __init__(self, layer: nn.Module, inputs: LayerInputs) -> None:
        super().__init__()
        self.captured = layer
        self.__dict__["inputs"] = inputs

    def forward(self, *tensors: torch.Tensor) -> Any:
        args, kwargs = self.__dict__["inputs"].rebuild(tensors)
        return self.captured(*args, **kwargs)


class PlainCall(nn.Module):
    """A module called with tensors alone, by position or by name."""

    def __init__(self, module: nn.Module, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.captured = module
        self.__dict__["names"] = names

    def forward(self, *tensors: torch.Tensor) -> Any:
        names = self.__dict__["names"]
        return self.captured(**dict(zip(names, tensors, strict=True))) if names else self.captured(*tensors)


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Training mode while open: what is captured is what trains, dropout included."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        yield
    finally:
        for module, mode in before:
            module.training = mode


def capture_model(model: nn.Module, kinds: tuple[LayerKind, ...], num_layers: int) -> tuple[CapturedGraph, ...]:
    """Capture one layer of each kind, the experts inside it, and the model around the layers.

    Args:
        model: a causal language model on meta, bf16.
        kinds: layer kinds of the profile.
        num_layers: length of the list of decoder layers.

    Returns:
        Graphs in the order of first occurrence, then ``embedding`` and ``final`` (final norm, head, loss).

    Raises:
        CheckpointError: ``no-decoder-layers``, ``capture-failed``.
    """
    path, layers = find_layers(model, num_layers)
    captured: list[CapturedGraph] = []
    with training(model):
        try:
            program, inputs = trace_skeleton(model, path)
        except CAPTURE_ERRORS as error:
            raise CheckpointError(
                "capture-failed",
                f"the model around its layers cannot be traced: {_reason(error)}",
                where=type(model).__name__,
                next_action="check that config.json's sizes fit each other; this family may need its own capture rule",
            ) from error
        for group in group_layers(layers, kinds):
            captured.extend(_capture_layer(layers, path, group, inputs))
    whole = _graph(of_program(program), "final", "", ("",), model)
    assert whole.graph is not None
    before, after = split_at_layers(whole.graph)
    captured.append(replace(whole, kind="embedding", graph=before))
    captured.append(replace(whole, graph=after, leaves={**whole.leaves, HIDDEN: ("input", HIDDEN)}))
    return tuple(captured)


def split_at_layers(graph: fx.Graph) -> tuple[fx.Graph, fx.Graph]:
    """Before the first layer (token ids → hidden states), and after the last (hidden states → loss)."""
    places = [n for n in graph.nodes if n.target is torch.ops.shardwright_capture.layer.default]
    before = fx.Graph()
    seen: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node is places[0]:
            break
        seen[node] = before.node_copy(node, lambda n: seen[n])
    before.output((seen[places[0].args[0]],))
    after = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node is places[-1]:
            copied[node] = after.placeholder(HIDDEN)
            copied[node].meta = dict(node.meta)
        elif node.op == "output":
            after.output(fx.node.map_arg(node.args[0], lambda n: copied[n]))
        else:
            copied[node] = after.node_copy(node, lambda n: copied[n])
    return before, after


def capture_module(
    module: nn.Module, tensors: tuple[torch.Tensor, ...], kind: str, path: str
) -> tuple[CapturedGraph, ...]:
    """Capture any one module on meta tensors, as if it were the only one of its kind; then the experts inside it."""
    with training(module):
        return tuple(_capture(module, PlainCall(module), tensors, kind, (path,)))


def _capture_layer(
    layers: nn.ModuleList, path: str, group: KindGroup, inputs: dict[int, LayerInputs]
) -> Iterator[CapturedGraph]:
    layer, called = layers[group.indices[0]], inputs.get(group.indices[0])
    places = tuple(f"{path}.{i}" for i in group.indices)
    if called is None:
        reason = "the model's forward does not call this layer"
        yield CapturedGraph(group.name, places[0], places, layer, None, {}, "opaque", reason)
        return
    yield from _capture(layer, LayerCall(layer, called), called.tensors, group.name, places)


def _capture(
    module: nn.Module, call: nn.Module, tensors: tuple[torch.Tensor, ...], kind: str, places: tuple[str, ...]
) -> Iterator[CapturedGraph]:
    """A module with its experts as single nodes, then the arithmetic of each experts module."""
    opaque = OpaqueExperts(module)
    try:
        with opaque.installed(), opaque_rules(module), opaque_indexers(module), counted_cuts(module):
            traced = trace_call(call, tensors)
    except CAPTURE_ERRORS as error:
        yield _failed(kind, places[0], places, module, error)
        return
    yield _graph(traced, kind, places[0], places, module)
    for inner in opaque.calls.values():
        body = body_of(inner)
        path = ".".join(part for part in (inner.path, body.path) if part)
        inner_places = tuple(".".join(part for part in (place, path) if part) for place in places)
        try:
            with body.spelled():
                traced = trace_call(PlainCall(body.module, body.names), body.values)
        except CAPTURE_ERRORS as error:
            yield _failed(kind + EXPERTS_SUFFIX, inner_places[0], inner_places, body.module, error, inner)
            continue
        yield _graph(traced, kind + EXPERTS_SUFFIX, inner_places[0], inner_places, body.module, inner)


def _graph(
    traced: Traced,
    kind: str,
    module_path: str,
    occurrences: tuple[str, ...],
    module: nn.Module,
    call: ExpertsCall | None = None,
) -> CapturedGraph:
    leaves: dict[str, tuple[Literal["parameter", "buffer", "input"], str]] = {}
    for placeholder, (group, name) in traced.leaves.items():
        leaves[placeholder] = (group, _qualified(name, module_path))
    for position, placeholder in enumerate(traced.inputs):
        label = _value_name(call, position) if call else placeholder
        leaves[placeholder] = ("input", label)
    return CapturedGraph(kind, module_path, occurrences, module, traced.graph, leaves, traced.method, "", call)


def _value_name(call: ExpertsCall, position: int) -> str:
    """One name for each of the three values that experts take, whatever the class calls them."""
    if len(call.names) == len(EXPERT_VALUES) and not call.values[1].is_floating_point():
        return EXPERT_VALUES[position]
    return call.names[position]


def _qualified(name: str, module_path: str) -> str:
    """The wrapper's ``captured.x`` as a name in the model."""
    inner = name.removeprefix("captured.")
    return f"{module_path}.{inner}" if module_path else inner


def _failed(
    kind: str,
    module_path: str,
    occurrences: tuple[str, ...],
    module: nn.Module,
    error: Exception,
    call: ExpertsCall | None = None,
) -> CapturedGraph:
    return CapturedGraph(kind, module_path, occurrences, module, None, {}, "opaque", _reason(error), call)


def _reason(error: Exception) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]
