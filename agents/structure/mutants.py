"""Changes to a captured graph that a fusion must not survive unseen: the near misses that every pattern can be put to.

Each mutant of a match is the same graph with one thing changed inside the region. A pattern may no longer find it, may
refuse it, or may bind the change as a constant; it may not call it legal as if nothing had changed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import Match

MOST = 3
"""Mutants of one kind for one match."""
_DTYPES = {torch.float32: torch.float16, torch.bfloat16: torch.float16, torch.float16: torch.float32}
_KEPT = frozenset({"view", "reshape", "expand", "_unsafe_view", "topk", "unbind"})
"""Operations whose numbers are sizes and places, not constants of a formula."""

Edit = Callable[[fx.Graph, dict[fx.Node, fx.Node]], None]
"""Changes a copied graph in place; the map leads from the nodes of the original to its own."""


@dataclass(frozen=True)
class Mutant:
    """One changed graph."""

    name: str
    captured: CapturedGraph


def mutants(match: Match) -> Iterator[Mutant]:
    """Changed copies of the graph that a match was found in; changes that no longer run are left out."""
    for kind, edits in (
        ("read elsewhere", _escapes(match)),
        ("written in place between", _writes(match)),
        ("constant changed", _constants(match)),
        ("cast changed", _casts(match)),
        ("permutation changed", _permutations(match)),
        ("two readers, two inputs", _split_reads(match)),
    ):
        made = 0
        for at, edit in edits:
            changed = _changed(match.captured, edit)
            if changed is not None and made < MOST:
                made += 1
                yield Mutant(f"{kind}: {at}", changed)


def _changed(captured: CapturedGraph, edit: Edit) -> CapturedGraph | None:
    """The capture with a changed graph whose sizes and formats follow from the change; ``None`` where it cannot run."""
    assert captured.graph is not None
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        copied[node] = graph.node_copy(node, lambda n: copied[n])
        copied[node].meta = dict(node.meta)
    edit(graph, copied)
    try:
        _infer(graph)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    leaves = {copied[n].name: captured.leaves[n.name] for n in captured.graph.nodes if n.name in captured.leaves}
    return replace(captured, graph=graph, leaves=leaves)


def _infer(graph: fx.Graph) -> None:
    """Run every operation on meta tensors anew."""
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            env[node] = node.meta.get("val")
        elif node.op == "call_function" and "_assert" not in str(node.target):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = node.target(*args, **kwargs)
            node.meta["val"] = env[node]


def _inner(match: Match) -> list[fx.Node]:
    """Tensors that the region makes and keeps to itself."""
    region = match.region
    open_ids = {*region.outputs.values(), *region.inputs.values()}
    ids = region.canonical.value_of
    return [
        n
        for n in region.nodes
        if ids.get(n, "") not in ("", *open_ids)
        and isinstance(n.meta.get("val"), torch.Tensor)
        and n not in region.result.values()
    ]


def _escapes(match: Match) -> Iterator[tuple[str, Edit]]:
    for node in _inner(match):

        def edit(graph: fx.Graph, copied: dict[fx.Node, fx.Node], node: fx.Node = node) -> None:
            output = next(n for n in graph.nodes if n.op == "output")
            with graph.inserting_before(output):
                total = graph.call_function(torch.ops.aten.sum.default, (copied[node],))
            results = output.args[0]
            output.args = ((*results, total) if isinstance(results, (tuple, list)) else (results, total),)

        yield node.name, edit


def _activations(match: Match) -> list[fx.Node]:
    """Floating inputs of the region that are not parameters."""
    border = match.region.border.items()
    return [
        node
        for node, role in border
        if role not in match.parameters
        and isinstance(node.meta.get("val"), torch.Tensor)
        and node.meta["val"].is_floating_point()
    ]


def _writes(match: Match) -> Iterator[tuple[str, Edit]]:
    """An input overwritten after the region's first reader of it."""
    inside = set(match.region.nodes)
    for node in _activations(match):
        first = next(n for n in match.region.nodes if node in n.all_input_nodes and n in inside)

        def edit(graph: fx.Graph, copied: dict[fx.Node, fx.Node], node: fx.Node = node, first: fx.Node = first) -> None:
            with graph.inserting_after(copied[first]):
                graph.call_function(torch.ops.aten.mul_.Tensor, (copied[node], 2.0))

        yield node.name, edit


def _constants(match: Match) -> Iterator[tuple[str, Edit]]:
    """A number of a formula, made larger."""
    for node in match.region.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or _short(node) in _KEPT:
            continue
        for place, value in enumerate(node.args):
            if isinstance(value, float) and value not in (0.0, float("inf"), float("-inf")):

                def edit(
                    graph: fx.Graph, copied: dict[fx.Node, fx.Node], node: fx.Node = node, place: int = place
                ) -> None:
                    args = list(copied[node].args)
                    args[place] = 1.5 * float(args[place])  # type: ignore[arg-type]
                    copied[node].args = tuple(args)

                yield f"{node.name} {value:g}", edit


def _casts(match: Match) -> Iterator[tuple[str, Edit]]:
    for node in (n for n in match.region.nodes if "_assert" not in str(n.target)):
        for place, value in enumerate(node.args):
            if value in _DTYPES:

                def edit(
                    graph: fx.Graph, copied: dict[fx.Node, fx.Node], node: fx.Node = node, place: int = place
                ) -> None:
                    args = list(copied[node].args)
                    args[place] = _DTYPES[args[place]]  # type: ignore[index]
                    copied[node].args = tuple(args)

                yield node.name, edit


def _permutations(match: Match) -> Iterator[tuple[str, Edit]]:
    """The last two dimensions, turned once more, behind every permutation."""
    for node in match.region.nodes:
        value = node.meta.get("val")
        if _short(node) not in ("permute", "transpose", "t") or not isinstance(value, torch.Tensor):
            continue
        if value.dim() < 2 or value.shape[-1] != value.shape[-2]:
            rank = value.dim()
            pairs = [(i, j) for i in range(rank) for j in range(i) if value.shape[i] == value.shape[j] > 1]
        else:
            pairs = [(value.dim() - 2, value.dim() - 1)]
        for one, other in pairs[:1]:

            def edit(
                graph: fx.Graph,
                copied: dict[fx.Node, fx.Node],
                node: fx.Node = node,
                pair: tuple[int, int] = (one, other),
            ) -> None:
                with graph.inserting_after(copied[node]):
                    turned = graph.call_function(torch.ops.aten.transpose.int, (copied[node], *pair))
                copied[node].replace_all_uses_with(turned, lambda user: user is not turned)

            yield node.name, edit


def _split_reads(match: Match) -> Iterator[tuple[str, Edit]]:
    """Of two readers of one input, the last reads another value."""
    inside = set(match.region.nodes)
    for node in _activations(match):
        readers = [n for n in node.users if n in inside]
        if len(readers) < 2:
            continue

        def edit(
            graph: fx.Graph, copied: dict[fx.Node, fx.Node], node: fx.Node = node, last: fx.Node = readers[-1]
        ) -> None:
            with graph.inserting_after(copied[node]):
                other = graph.call_function(torch.ops.aten.add.Scalar, (copied[node], 1.0))
            copied[last].replace_input_with(copied[node], other)

        yield node.name, edit


def _short(node: fx.Node) -> str:
    if node.target is operator.getitem or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return str(node.target._schema.name.split("::")[-1])
