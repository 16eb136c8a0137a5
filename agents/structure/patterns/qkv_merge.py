"""Projections at the entrance of an attention as one product: q, k, v; MLA's two latents; a recurrence's gates too.

An attention is a module whose own forward runs a scaled product or a recurrence, or spells one out: a softmax between
two matrix products.
"""

from __future__ import annotations

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import Match, View, below
from shardwright.agents.structure.patterns.merging import MergedProjections, projections
from shardwright.schemas.graph import OpNode

CORES = ("scaled_dot_product_attention", "delta_rule")
"""Operations that make a module an attention."""
TWO_PRODUCTS = 2


class QkvMerge(MergedProjections):
    """All projections of an attention's input, merged."""

    name = "qkv_merge"
    title = "Merged q/k/v projections"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        places = dict.fromkeys(node.module_path for core in CORES for node in view.ops(core))
        places |= dict.fromkeys(node.module_path for node in view.ops("softmax") if _between_products(view, node))
        found = [self._at(captured, graph, view, place) for place in places if place]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, place: str) -> Match | None:
        """The largest group of the module's own projections that read one value."""
        groups: dict[str, list[OpNode]] = {}
        for node in view.ops("linear"):
            if below(view.operand(node, 1).target, place) is not None:
                groups.setdefault(node.inputs[0], []).append(node)
        own = [node.id for group in groups.values() for node in group]
        candidates = [[n for n in projections(view, graph.by_id[x]) if n.id in own] for x in groups]
        best = max(candidates, key=len, default=[])
        return self.bind_group(captured, graph, place, best)


def _between_products(view: View, softmax: OpNode) -> bool:
    """Whether a module multiplies both before and after a softmax of its own."""
    own = [node for node in view.ops("matmul") if node.module_path == softmax.module_path]
    return len(own) >= TWO_PRODUCTS
