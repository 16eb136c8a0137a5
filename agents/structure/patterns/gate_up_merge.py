"""Gate and up projection of an MLP as one product, gate first: the two operands of a gated activation."""

from __future__ import annotations

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import Match, View, holder
from shardwright.agents.structure.patterns.gates import GATES, find_gates
from shardwright.agents.structure.patterns.merging import MergedProjections, projections


class GateUpMerge(MergedProjections):
    """Gate and up, merged."""

    name = "gate_up_merge"
    title = "Merged gate/up projections"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        found: dict[frozenset[str], Match] = {}
        for node in (n for n in graph.nodes if n.kind == "op" and n.target in ("mul", "cast")):
            for gate in find_gates(view, node):
                pair = {gate.gate.id, gate.up.id}
                key = frozenset(pair)
                if not GATES[gate.form].gated or len(pair) != 2 or key in found or not gate.gate.inputs:
                    continue
                beside = [n for n in projections(view, view.operand(gate.gate)) if n.id in pair]
                if len(beside) != 2:
                    continue
                anchor = holder(view.operand(beside[0], 1).target, view.operand(beside[1], 1).target)
                match = self.bind_group(captured, graph, anchor, beside)
                if match is not None:
                    found[key] = match
        return tuple(found.values())
