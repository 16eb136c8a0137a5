"""Which values share storage, and which operations write in place.

Conservative: an operation that may return a view (its schema says so) is taken to return one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx


@dataclass(frozen=True)
class Mutation:
    """One in-place write."""

    node: fx.Node
    position: int
    """Of the write in execution order."""
    written: tuple[fx.Node, ...]


class Storages:
    """Union-find over nodes that may share memory, and the writes to them.

    Args:
        graph: a flat graph in execution order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self._parent: dict[fx.Node, fx.Node] = {}
        self.mutations: list[Mutation] = []
        for node in graph.nodes:
            for operand in may_alias(node):
                self._join(node, operand)
            written = writes(node)
            if written:
                self.mutations.append(Mutation(node, self.position[node], written))

    def root(self, node: fx.Node) -> fx.Node:
        while node in self._parent:
            node = self._parent[node]
        return node

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        a, b = self.root(one), self.root(other)
        if a is not b:
            self._parent[a] = b

    def share(self, one: fx.Node, other: fx.Node) -> bool:
        return self.root(one) is self.root(other)

    def last_write(self, node: fx.Node, before: int) -> Mutation | None:
        """The last in-place write to a node's storage after the node was made and before a position."""
        found = None
        for mutation in self.mutations:
            inside = self.position[node] < mutation.position < before
            if inside and mutation.node is not node and any(self.share(node, w) for w in mutation.written):
                found = mutation
        return found

    def writers(self, node: fx.Node, reader: fx.Node) -> tuple[fx.Node, ...]:
        """In-place writes to a node's storage between the node and a reader of it, other than the two."""
        first, last = self.position[node], self.position[reader]
        return tuple(
            mutation.node
            for mutation in self.mutations
            if first < mutation.position < last and any(self.share(node, w) for w in mutation.written)
        )


def may_alias(node: fx.Node) -> tuple[fx.Node, ...]:
    """Operands whose memory the result may be."""
    if node.op != "call_function":
        return ()
    if getattr(node.target, "__name__", "") == "getitem":
        source = node.args[0]
        return (source,) if isinstance(source, fx.Node) and may_alias(source) else ()
    return _annotated(node, write_only=False)


def writes(node: fx.Node) -> tuple[fx.Node, ...]:
    """Operands that the operation writes."""
    return _annotated(node, write_only=True)


def _annotated(node: fx.Node, *, write_only: bool) -> tuple[fx.Node, ...]:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ()
    operands: list[fx.Node] = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or (write_only and not argument.alias_info.is_write):
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, fx.Node):
                operands.append(item)
    return tuple(operands)
