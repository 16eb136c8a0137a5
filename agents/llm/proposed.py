"""A region that a model proposed, as a pattern like any other: the same certificate, the same differential test.

What it computes is not known by a name, so the model's own spelling is the traced region itself and the independent
formula is the canonical graph read by ``meaning``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import fx, nn

from shardwright.agents.llm.meaning import evaluate
from shardwright.agents.llm.open_regions import VIEWS, OpenRegion
from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.interpret import choose_sizes
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec
from shardwright.agents.structure.region import Region, extract, standalone
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import VariantPredicate

NOT_A_MODULE = "workers compile whole modules, and the region is a part of one"


@dataclass(frozen=True)
class ProposedRegion(Pattern):
    """The pattern of exactly one region."""

    region: Region
    whole_module: bool

    name = "proposed-region"
    version = 1
    title = "Proposed region"
    costed = False

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        """Nothing: it was not found by a rule."""
        return ()

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """The traced operations again, on other tensors."""
        graph = standalone(self.region)
        order = [node.name.removeprefix("role_") for node in graph.nodes if node.op == "placeholder"]
        results = fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(*(values[role] for role in order))
        return dict(zip(sorted(self.region.result), results, strict=True))

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """The canonical operations by their meaning."""
        known = {self.region.inputs[role]: value for role, value in values.items()}
        seen = evaluate(self.region.op_nodes, known, choose_sizes(self.region))
        return {role: seen[i] for role, i in self.region.outputs.items()}

    def gradients(self, match: Match) -> tuple[str, ...]:
        """Every floating input."""
        return tuple(role for role in self.region.inputs if "float" in self.region.spec(role).dtype)

    def variants(self) -> tuple[VariantSpec, ...]:
        """As it is, or compiled."""
        anywhere = VariantPredicate(ep_max=None, device_types=("cuda", "cpu"), packing=("plain",))
        because = "" if self.whole_module else NOT_A_MODULE
        return (
            VariantSpec("eager", "eager", "-", anywhere),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=because),
        )

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        """No operator of ours is named by it."""
        return {}


def as_match(open_region: OpenRegion) -> Match:
    """A match of exactly these nodes.

    Raises:
        LegalityError: ``not-a-region`` where the nodes do not lie between their inputs and outputs.
    """
    inputs = {f"x{at}": i for at, i in enumerate(open_region.inputs)}
    outputs = {f"y{at}": i for at, i in enumerate(open_region.outputs)}
    if any(open_region.canonical.by_id[i].output is None for i in (*inputs.values(), *outputs.values())):
        raise LegalityError(
            "not-a-region",
            "an input or output is several values at once",
            where=open_region.captured.kind,
            next_action="take in the nodes that read its parts",
        )
    region = extract(open_region.canonical, inputs, outputs)
    if region is None or set(region.canonical_ids) != set(open_region.nodes):
        raise LegalityError(
            "not-a-region",
            f"{len(open_region.nodes)} nodes do not lie between their inputs and outputs",
            where=open_region.captured.kind,
            next_action="choose nodes that hang together",
        )
    anchor = anchor_of(open_region)
    by_id = open_region.canonical.by_id
    parameters = {role: by_id[i].target for role, i in inputs.items() if by_id[i].kind == "parameter"}
    pattern = ProposedRegion(region, covers_module(open_region, anchor))
    digest = {"operations": len(region.op_nodes), "launches": open_region.launches}
    return Match(pattern, open_region.captured, region, digest, anchor, {}, parameters)


def anchor_of(region: OpenRegion) -> str:
    """The innermost module around all operations."""
    paths = [node.module_path.split(".") for node in region.op_nodes]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)


def covers_module(region: OpenRegion, anchor: str) -> bool:
    """Whether the region is all that the anchor computes: then a worker can compile that module."""
    if not anchor or anchor == region.captured.module_path:
        return False
    inside = set(region.nodes)
    return all(
        node.id in inside or node.target in VIEWS
        for node in region.canonical.nodes
        if node.kind == "op" and (node.module_path == anchor or node.module_path.startswith(anchor + "."))
    )
