"""Regions that no pattern claims: connected sets of fusible operations between those that end a fusion.

Two operations belong together only where the same number of ending operations (products, convolutions, selections by
data) lies before both; so a region is convex: nothing leaves it and comes back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import networkx as nx

from shardwright.agents.llm.meaning import MEANINGS, TUPLES
from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.schemas.graph import OpNode, TensorSpec

VIEWS = frozenset({"reshape", "permute", "expand", "slice", "getitem"})
"""Fusible, and no launch of their own."""

LEAST_LAUNCHES = 2
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "bool": 1}


@dataclass(frozen=True)
class OpenRegion:
    """Operations of one captured graph that might be one kernel."""

    captured: CapturedGraph
    canonical: CanonicalGraph
    nodes: tuple[str, ...]
    """Canonical ids, in canonical order."""

    @property
    def op_nodes(self) -> tuple[OpNode, ...]:
        return tuple(self.canonical.by_id[i] for i in self.nodes)

    @property
    def launches(self) -> int:
        """Kernels that eager torch launches, forward."""
        return sum(node.target not in VIEWS for node in self.op_nodes)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Canonical ids of what it reads from outside."""
        inside = set(self.nodes)
        return tuple(dict.fromkeys(i for node in self.op_nodes for i in node.inputs if i not in inside))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Canonical ids of what the rest of the graph reads of it."""
        inside, ends = set(self.nodes), set(self.canonical.outputs)
        return tuple(
            i for i in self.nodes if i in ends or any(user.id not in inside for user in self.canonical.users(i))
        )

    @property
    def floor_bytes(self) -> int:
        """Inputs read once and outputs written once."""
        return sum(size_bytes(self.canonical.by_id[i].output) for i in (*self.inputs, *self.outputs))

    @property
    def eager_bytes(self) -> int:
        """What eager torch moves: every operation reads its operands and writes its result."""
        moved = 0
        for node in self.op_nodes:
            if node.target not in VIEWS:
                operands = (self.canonical.by_id[i].output for i in node.inputs)
                moved += size_bytes(node.output) + sum(size_bytes(spec) for spec in operands)
        return moved

    def part(self, chosen: Collection[str]) -> OpenRegion:
        """The same region with some of its nodes only."""
        return OpenRegion(self.captured, self.canonical, tuple(i for i in self.nodes if i in chosen))


def size_bytes(spec: TensorSpec | None) -> int:
    """Bytes of one value; none for what is no tensor."""
    if spec is None:
        return 0
    count = 1
    for size in spec.shape:
        count *= size
    return count * DTYPE_BYTES.get(spec.dtype, 1)


def open_regions(
    captured: CapturedGraph, canonical: CanonicalGraph, claimed: Collection[str]
) -> tuple[OpenRegion, ...]:
    """All open regions of one graph with at least two launches, the one that wastes most bytes first.

    Args:
        claimed: canonical ids that lie in a match of a pattern.
    """
    depth: dict[str, int] = {}
    fusible: set[str] = set()
    for node in nx.topological_sort(canonical.network):
        one = canonical.by_id[node]
        typed = one.output is not None or one.target in TUPLES
        ok = one.kind == "op" and one.target in MEANINGS and typed and node not in claimed
        ok = ok and not (one.target == "getitem" and one.inputs[0] not in fusible)
        before = max((depth[i] + (canonical.by_id[i].kind == "op" and i not in fusible) for i in one.inputs), default=0)
        depth[node] = before
        if ok:
            fusible.add(node)
    together = nx.Graph()
    together.add_nodes_from(fusible)
    for node in fusible:
        together.add_edges_from(
            (i, node) for i in canonical.by_id[node].inputs if i in fusible and depth[i] == depth[node]
        )
    order = {node.id: at for at, node in enumerate(canonical.nodes)}
    parts = [tuple(sorted(part, key=order.__getitem__)) for part in nx.connected_components(together)]
    found = [OpenRegion(captured, canonical, part) for part in sorted(parts, key=lambda p: order[p[0]])]
    worth = [region for region in found if region.launches >= LEAST_LAUNCHES]
    return tuple(sorted(worth, key=lambda region: region.floor_bytes - region.eager_bytes))
