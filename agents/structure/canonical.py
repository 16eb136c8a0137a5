"""The canonical graph of a captured region: the same for every spelling of the same computation.

In-place writes are read as their functional counterparts. Where a value is read through another name after a write to
its memory, that read becomes a ``stale`` node, which no pattern matches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import networkx as nx
import torch
from torch import fx

from shardwright.agents.structure.aliasing import Storages
from shardwright.agents.structure.builder import Builder, Call, Place, Ref, spec_of
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.ordering import canonical_order
from shardwright.agents.structure.spelling import RULES, generic
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.graph import LayerGraph, OpNode

Leaf = tuple[Literal["parameter", "buffer", "input"], str]

_TORCH = str(Path(torch.__file__).parent)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_DROPPED = frozenset({"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size"})


@dataclass(frozen=True)
class CanonicalGraph:
    """Ordered nodes, and which traced node carries which canonical value."""

    nodes: tuple[OpNode, ...]
    value_of: dict[fx.Node, str]
    """Traced node → canonical id of its value; dead values are absent."""
    graph: fx.Graph
    storages: Storages
    outputs: tuple[str, ...]

    @cached_property
    def by_id(self) -> dict[str, OpNode]:
        return {node.id: node for node in self.nodes}

    @cached_property
    def network(self) -> nx.MultiDiGraph:
        """Edges from operand to user with the operand's position."""
        network = nx.MultiDiGraph()
        network.add_nodes_from(node.id for node in self.nodes)
        for node in self.nodes:
            for position, operand in enumerate(node.inputs):
                network.add_edge(operand, node.id, position=position)
        return network

    def users(self, node_id: str) -> tuple[OpNode, ...]:
        """Nodes that read a value, each once, in canonical order."""
        found = set(self.network.successors(node_id))
        return tuple(node for node in self.nodes if node.id in found)

    @cached_property
    def digest(self) -> str:
        """Hash without names and sources."""
        place = {node.id: i for i, node in enumerate(self.nodes)}
        facts = []
        for node in self.nodes:
            operands = [place[i] for i in node.inputs]
            size = [list(node.output.shape), node.output.dtype] if node.output else None
            facts.append([node.kind, node.target if node.kind == "op" else "", operands, node.arguments, size])
        return sha256_of([facts, [place[i] for i in self.outputs]])


def canonicalise(
    graph: fx.Graph, leaves: Mapping[str, Leaf], prefix: str = "", *, labelled: bool = False
) -> CanonicalGraph:
    """Canonical form of a flat traced graph.

    Args:
        graph: flat, in execution order, ending in an output node.
        leaves: placeholder name → kind and name.
        prefix: module path of the captured module, put before the paths of its parts.
        labelled: tell leaves apart by name in the order (for comparing two graphs over the same leaves).
    """
    builder = Builder()
    storages = Storages(graph)
    env: dict[fx.Node, Any] = {}
    outputs: list[int] = []
    for node in graph.nodes:
        builder.place = place_of(node, prefix)
        if node.op == "placeholder":
            spec = spec_of(node.meta.get("val"))
            kind, name = leaves.get(node.name, ("input", node.name))
            env[node] = builder.leaf(kind, name, spec) if spec else None
        elif node.op == "get_attr":
            env[node] = builder.leaf("buffer", str(node.target), spec_of(node.meta.get("val")))
        elif node.op == "output":
            outputs = [ref.index for ref in _references(_read(node.args[0], node, env, storages, builder))]
        else:
            env[node] = _canonical_call(node, env, storages, builder)
    labels = {i: d.target for i, d in enumerate(builder.drafts) if d.kind != "op"} if labelled else {}
    order, operands = canonical_order(builder.drafts, outputs, labels)
    ids = {index: f"n{position:03d}" for position, index in enumerate(order)}
    nodes = tuple(_node(builder, index, ids, operands[index]) for index in order)
    value_of = {node: ids[ref.index] for node, ref in env.items() if isinstance(ref, Ref) and ref.index in ids}
    return CanonicalGraph(nodes, value_of, graph, storages, tuple(ids[i] for i in outputs))


def _node(builder: Builder, index: int, ids: dict[int, str], operands: tuple[int, ...]) -> OpNode:
    draft = builder.drafts[index]
    return OpNode(
        id=ids[index],
        kind=draft.kind,
        target=draft.target,
        inputs=tuple(ids[i] for i in operands),
        arguments=draft.arguments,
        output=draft.spec,
        module_path=draft.module_path,
        module_class=draft.module_class,
        source=draft.source,
    )


def _references(value: Any) -> list[Ref]:
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [ref for item in value for ref in _references(item)] if isinstance(value, (list, tuple)) else []


def _read(argument: Any, reader: fx.Node, env: dict[fx.Node, Any], storages: Storages, builder: Builder) -> Any:
    """An argument's canonical value at the moment it is read."""
    if isinstance(argument, fx.Node):
        value = env.get(argument)
        write = storages.last_write(argument, storages.position[reader])
        if write is None or not isinstance(value, Ref):
            return value
        if write.node.args and write.node.args[0] is argument:
            return env[write.node]
        return builder.emit("stale", [value, env[write.node]], {}, builder.spec(value))
    if isinstance(argument, (list, tuple)):
        return type(argument)(_read(item, reader, env, storages, builder) for item in argument)
    if isinstance(argument, dict):
        return {key: _read(item, reader, env, storages, builder) for key, item in argument.items()}
    return argument


def _canonical_call(node: fx.Node, env: dict[fx.Node, Any], storages: Storages, builder: Builder) -> Any:
    args = [_read(a, node, env, storages, builder) for a in node.args]
    kwargs = {k: _read(a, node, env, storages, builder) for k, a in node.kwargs.items()}
    spec = spec_of(node.meta.get("val"))
    if getattr(node.target, "__name__", "") == "getitem":
        if isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        return builder.emit("getitem", [args[0]], {"index": args[1]}, spec)
    if not isinstance(node.target, torch._ops.OpOverload):
        return builder.emit(str(node.target), _references([args, kwargs]), {}, spec)
    schema = node.target._schema
    name = schema.name.split("::")[-1]
    if name in _DROPPED:
        return None
    if schema.is_mutable and name.endswith("_"):
        name = name[:-1]
    values: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(args):
            value = args[position]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        if not _references(value) and argument.has_default_value() and value == argument.default_value:
            continue
        if value is not None:
            values[argument.name] = value
    call = Call(name, values, node, spec)
    rule = RULES.get(name) if values and isinstance(next(iter(values.values())), Ref) else None
    return rule(builder, call) if rule else generic(builder, call)


def place_of(node: fx.Node, prefix: str) -> Place:
    """Module path, class and source line of a traced node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = "", ""
    if stack:
        path, named = stack[-1][0], stack[-1][1]
        kind = (named if isinstance(named, str) else named.__qualname__).rsplit(".", 1)[-1]
        path = path.removeprefix("captured").removeprefix(".")
    full = ".".join(part for part in (prefix, path) if part)
    return Place(full, kind, source_line(node.meta.get("stack_trace") or ""))


def source_line(trace: str) -> str:
    """``package/file.py:line`` of the innermost frame outside torch; never an absolute path."""
    frames = [(file, line) for file, line in _FRAME.findall(trace) if not file.startswith(_TORCH)]
    return f"{_inside_package(frames[-1][0])}:{frames[-1][1]}" if frames else ""


@cache
def _inside_package(file: str) -> str:
    """A file's path from its outermost package on; its bare name outside any package."""
    path = Path(file)
    outermost = path
    while (outermost.parent / "__init__.py").is_file():
        outermost = outermost.parent
    return path.name if outermost == path else path.relative_to(outermost.parent).as_posix()


def opaque_layer(captured: CapturedGraph) -> LayerGraph:
    """A region that could not be traced: one node, with the reason."""
    node = OpNode(
        id="n000",
        kind="op",
        target="opaque",
        arguments={"reason": captured.reason},
        module_path=captured.module_path,
        module_class=type(captured.module).__name__,
    )
    return LayerGraph(
        kind=captured.kind,
        module_path=captured.module_path,
        occurrences=captured.occurrences,
        nodes=(node,),
        capture="opaque",
        digest=sha256_of(["opaque", type(captured.module).__qualname__]),
    )


def layer_graph(captured: CapturedGraph, canonical: CanonicalGraph) -> LayerGraph:
    """The part of the result that passes between rooms."""
    return LayerGraph(
        kind=captured.kind,
        module_path=captured.module_path,
        occurrences=captured.occurrences,
        nodes=canonical.nodes,
        capture=captured.capture,
        digest=canonical.digest,
    )


def canonical_graphs(captured: tuple[CapturedGraph, ...]) -> tuple[tuple[CapturedGraph, CanonicalGraph | None], ...]:
    """Each captured graph with its canonical form; ``None`` where capture failed."""
    return tuple(
        (one, canonicalise(one.graph, one.leaves, one.module_path) if one.graph is not None else None)
        for one in captured
    )
