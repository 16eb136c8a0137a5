"""What a matched region looks like before fusion: its nodes out of the captured graph, for reviewers."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.schemas.fusion import FusionProposal, RegionNode
from shardwright.schemas.graph import LayerGraph, OpGraph, OpNode


def with_subgraph(proposal: FusionProposal, graph: OpGraph) -> FusionProposal:
    """The proposal with its matched nodes and what they read; unchanged where the graph does not hold them all."""
    wanted = set(proposal.certificate.matched_nodes)
    layer = next((item for item in _candidates(proposal, graph) if wanted <= {node.id for node in item.nodes}), None)
    if layer is None or not wanted:
        return proposal
    return proposal.model_copy(update={"subgraph": tuple(_region(layer, wanted))})


def _candidates(proposal: FusionProposal, graph: OpGraph) -> list[LayerGraph]:
    kind = proposal.region.layer_kind
    exact = [layer for layer in graph.layers if layer.kind == kind]
    return exact or [layer for layer in graph.layers if kind.startswith(layer.kind)]


def _region(layer: LayerGraph, wanted: set[str]) -> Iterable[RegionNode]:
    nodes = {node.id: node for node in layer.nodes}
    read = {name for key in wanted for name in nodes[key].inputs if name in nodes}
    for node in layer.nodes:
        if node.id in wanted or node.id in read:
            yield _node(node, inside=node.id in wanted, kept=wanted | read)


def _node(node: OpNode, *, inside: bool, kept: set[str]) -> RegionNode:
    parameter = node.kind in ("parameter", "buffer")
    spec = node.output
    return RegionNode(
        id=node.id,
        kind="parameter" if parameter else "op" if inside and node.kind == "op" else "input",
        label=node.target,
        inputs=tuple(name for name in node.inputs if name in kept) if inside else (),
        output=f"[{', '.join(map(str, spec.shape))}] {spec.dtype}" if spec is not None else "",
        source=node.source,
    )
