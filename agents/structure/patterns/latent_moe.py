"""Experts in a latent width: ``y = up( [norm] experts( [norm] down x ) )``.

The experts' own arithmetic is a region of its own; here their result is an input and what they read is an output, so
that the region is the two projections with the norms between. A norm may stand in three places: ``before`` the experts
(on what they read), ``after`` them (on their weighted sum), and on ``each`` expert's result, inside the block.
Legend: T tokens, H hidden, L latent width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import PART_OF_MODULE, Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.rms_norm import Norm, norms, oracle_norm, reference_norm
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

NO_PLACE = "workers run the block's own forward, and no operator takes both projections and the dispatch between"
PLACES = ("before", "after")


class LatentMoe(Pattern):
    """The projections and norms around experts that work in a narrower width."""

    name = "latent_moe"
    version = 1
    title = "Latent experts"
    strided = ("x",)
    lora = "adapters wrap the projections, which stay modules of their own in every variant"
    cut = "at ep > 1 rows travel in the latent width: the cut lies between down and up"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view, by_end = View(graph), {norm.y.id: norm for norm in norms(graph)}
        by_start = {norm.x.id: norm for norm in by_end.values()}
        found = [self._at(captured, graph, view, node, by_start, by_end) for node in view.ops("experts")]
        return tuple(match for match in found if match is not None)

    def _at(
        self,
        captured: CapturedGraph,
        graph: CanonicalGraph,
        view: View,
        experts: OpNode,
        by_start: dict[str, Norm],
        by_end: dict[str, Norm],
    ) -> Match | None:
        latent = view.operand(experts)
        before, after = by_end.get(latent.id), by_start.get(experts.id)
        down = before.x if before else latent
        wide = [node for node in graph.users((after.y if after else experts).id) if view.is_op(node, "linear", 2)]
        if not view.is_op(down, "linear", 2) or len(wide) != 1 or wide[0].inputs[0] == down.inputs[0]:
            return None
        up, x = wide[0], view.operand(down)
        nodes = {"x": x, "down": view.operand(down, 1), "routed": experts, "up": view.operand(up, 1)}
        constants: dict[str, Any] = {"form": "latent", "each": _normed_inside(view, experts)}
        for place, norm in zip(PLACES, (before, after), strict=True):
            constants[place] = norm is not None
            if norm is not None:
                nodes[f"{place}_norm"] = norm.weight
                constants |= {f"{place}_{name}": value for name, value in norm.constants.items()}
        if x.output is None or nodes["up"].output is None or nodes["up"].output.shape[0] != x.output.shape[-1]:
            return None
        anchor = experts.module_path.rpartition(".")[0]
        names = {role: below(node.target, anchor) for role, node in nodes.items() if node.kind == "parameter"}
        if len(names) != len(nodes) - 2 or None in names.values():
            return None
        roles = {role: str(name).removesuffix(".weight") for role, name in names.items()}
        inputs = {role: node.id for role, node in nodes.items()}
        return self.bind(captured, graph, inputs, {"latent": latent.id, "y": up.id}, constants, anchor, roles)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        latent, routed = F.linear(values["x"], values["down"]), values["routed"]
        if constants["before"]:
            latent = reference_norm(latent, values["before_norm"], norm_constants(constants, "before"))
        if constants["after"]:
            routed = reference_norm(routed, values["after_norm"], norm_constants(constants, "after"))
        return {"latent": latent, "y": F.linear(routed, values["up"])}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        latent = torch.einsum("...h,lh->...l", values["x"], values["down"])
        routed = values["routed"]
        if constants["before"]:
            latent = oracle_norm(latent, values["before_norm"], norm_constants(constants, "before"))
        if constants["after"]:
            routed = oracle_norm(routed, values["after_norm"], norm_constants(constants, "after"))
        return {"latent": latent, "y": torch.einsum("...l,hl->...h", routed, values["up"])}

    def gradients(self, match: Match) -> tuple[str, ...]:
        return tuple(match.region.inputs)

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(ep_max=1, tp_max=1, device_types=("cuda",))
        return (
            VariantSpec("kernel-whole", "shardwright", "moe_layer", kernel, not_installable=NO_PLACE),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=PART_OF_MODULE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        latent, hidden = match.region.spec("down").shape
        return {"T": tokens, "H": hidden, "L": latent, "norms": sum(match.constants[place] for place in PLACES)}

    def unranked(self, match: Match, spec: VariantSpec) -> str:
        return "no operator of ours takes the two projections, so none is counted" if spec.op != "-" else ""


def norm_constants(constants: dict[str, Any], place: str) -> dict[str, Any]:
    """The constants of one of the norms, without its place."""
    return {
        name: constants[f"{place}_{name}"] for name in ("eps", "form", "weight_cast") if f"{place}_{name}" in constants
    }


def _normed_inside(view: View, experts: OpNode) -> bool:
    """Whether the block holds a norm's weight over the latent beside its stacks: a norm of each expert's result."""
    width = experts.output.shape[-1] if experts.output else 0
    leaves = [view.graph.by_id[i] for i in experts.inputs]
    return any(leaf.kind == "parameter" and leaf.output and leaf.output.shape == (width,) for leaf in leaves)
