"""A matched region in the traced graph: its nodes, its border, and what leaves it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from shardwright.agents.structure.canonical import CanonicalGraph, canonicalise
from shardwright.schemas.graph import OpNode, TensorSpec


@dataclass(frozen=True)
class Region:
    """Traced nodes between bound inputs and outputs, in execution order.

    Args:
        inputs: role → canonical id (activations and parameters).
        outputs: role → canonical id.
    """

    canonical: CanonicalGraph
    inputs: dict[str, str]
    outputs: dict[str, str]
    nodes: tuple[fx.Node, ...]
    border: dict[fx.Node, str]
    """Traced nodes outside that the region reads → role."""
    result: dict[str, fx.Node]
    """Role → the traced node that computes it."""

    @property
    def canonical_ids(self) -> tuple[str, ...]:
        """Canonical nodes inside, in canonical order."""
        inside = {self.canonical.value_of[n] for n in self.nodes if n in self.canonical.value_of}
        return tuple(node.id for node in self.canonical.nodes if node.id in inside)

    @property
    def op_nodes(self) -> tuple[OpNode, ...]:
        return tuple(self.canonical.by_id[i] for i in self.canonical_ids)

    def spec(self, role: str) -> TensorSpec:
        node_id = self.inputs.get(role) or self.outputs[role]
        spec = self.canonical.by_id[node_id].output
        assert spec is not None, "roles are bound to tensors"
        return spec

    @property
    def interval(self) -> tuple[int, int]:
        """Execution positions of the first and the last node."""
        positions = [self.canonical.storages.position[n] for n in self.nodes]
        return min(positions), max(positions)


def extract(canonical: CanonicalGraph, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Region | None:
    """Walk from the outputs back to the bound inputs, through operands and through in-place writes to them.

    Returns:
        ``None`` where the walk meets a leaf that no role binds, or an input that nothing reads: then the roles do not
        describe the region.
    """
    roles = {node_id: role for role, node_id in inputs.items()}
    first: dict[str, fx.Node] = {}
    for node in canonical.graph.nodes:
        if node in canonical.value_of:
            first.setdefault(canonical.value_of[node], node)
    inside: set[fx.Node] = set()
    border: dict[fx.Node, str] = {}
    stack = [first[node_id] for node_id in outputs.values()]
    while stack:
        node = stack.pop()
        if node in inside:
            continue
        if node.op == "placeholder":
            return None
        inside.add(node)
        for operand in node.all_input_nodes:
            role = roles.get(canonical.value_of.get(operand, ""))
            if role is not None:
                border[operand] = role
            else:
                stack.append(operand)
                stack += canonical.storages.writers(operand, node)
    if set(border.values()) != set(inputs):
        return None
    ordered = tuple(node for node in canonical.graph.nodes if node in inside)
    result = {role: first[node_id] for role, node_id in outputs.items()}
    return Region(canonical, dict(inputs), dict(outputs), ordered, border, result)


def escaping(region: Region) -> tuple[tuple[fx.Node, fx.Node], ...]:
    """Inner values that something outside reads: (value, reader)."""
    inside = set(region.nodes)
    open_ids = {*region.outputs.values(), *region.inputs.values()}
    found = []
    for node in region.nodes:
        if region.canonical.value_of.get(node) in open_ids:
            continue
        found += [(node, user) for user in node.users if user not in inside and _reads(user)]
    return tuple(found)


def _reads(user: fx.Node) -> bool:
    """Whether a user takes the value itself; tracing assertions and calls whose results nobody uses do not."""
    return "_assert" not in str(user.target) and not _dead(user)


def _dead(node: fx.Node) -> bool:
    """Whether a call leaves no trace: neither it nor any use of its results writes, draws, or is a result."""
    stack, seen = [node], {node}
    while stack:
        one = stack.pop()
        if not _pure(one):
            return False
        stack += [user for user in one.users if user not in seen]
        seen.update(one.users)
    return True


def _pure(node: fx.Node) -> bool:
    """A call that writes to nothing and takes no random numbers."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded not in node.target.tags and not node.target._schema.is_mutable
    return node.target is operator.getitem


def standalone(region: Region) -> fx.Graph:
    """The region as a graph of its own: one placeholder for each role, results in the order of their roles."""
    graph = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    placeholders: dict[str, fx.Node] = {}
    for node, role in region.border.items():
        if role not in placeholders:
            placeholders[role] = graph.placeholder(f"role_{role}")
            placeholders[role].meta = {"val": node.meta["val"]}
        mapped[node] = placeholders[role]
    for node in region.nodes:
        mapped[node] = graph.node_copy(node, lambda n: mapped[n])
    graph.output(tuple(mapped[region.result[role]] for role in sorted(region.result)))
    return graph


def canonical_region(region: Region) -> CanonicalGraph:
    """Canonical form of the region with its inputs told apart by role."""
    graph = standalone(region)
    leaves = {n.name: ("input", n.name.removeprefix("role_")) for n in graph.nodes if n.op == "placeholder"}
    return canonicalise(graph, leaves, labelled=True)  # type: ignore[arg-type]
