"""The shared expert beside the routed ones: ``y = routed + [σ(x gᵀ) ·] down(act(gate x) · up x)``.

Every token passes the shared expert, so it can run while the routed rows travel. The routed value is an input: its
experts are a region of their own. Forms of the MLP: two linears, one merged projection, or no gate.
Legend: T tokens, H hidden, I width of the shared expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import PART_OF_MODULE, Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.gates import GATES, Found, find_gates
from shardwright.agents.structure.patterns.rms_norm import rows_per_token
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

NOT_OVERLAPPED = "workers run the block's own forward, which starts the shared expert where the model's code does"


class SharedExpert(Pattern):
    """A dense MLP of the tokens that the router sees, added to the routed experts' result."""

    name = "shared_expert"
    version = 1
    title = "Shared expert"
    strided = ("x",)
    lora = "adapters wrap the linears, which stay modules of their own in every variant"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view, found = View(graph), []
        for total in view.ops("add"):
            for routed, shared in view.both_orders(total):
                match = self._at(captured, graph, view, total, routed, shared)
                if match is not None:
                    found.append(match)
        return tuple(found)

    def _at(
        self,
        captured: CapturedGraph,
        graph: CanonicalGraph,
        view: View,
        total: OpNode,
        routed: OpNode,
        shared: OpNode,
    ) -> Match | None:
        anchor = total.module_path
        experts = experts_behind(view, routed, anchor)
        if experts is None or any(node == experts for node in _made_inside(view, shared, anchor)):
            return None
        nodes: dict[str, OpNode] = {"routed": routed}
        flat = view.is_op(shared, "reshape", 1)
        inner = view.operand(shared) if flat else shared
        opened = self._opened(view, inner)
        constants: dict[str, Any] = {"gated": opened is not None, "flat": flat}
        if opened is not None:
            inner, nodes["opening"] = opened[1], opened[2]
        mlp = read_mlp(view, inner)
        if mlp is None:
            return None
        mlp_nodes, mlp_constants = mlp
        if opened is not None and opened[0] != mlp_nodes["x"]:
            return None
        if not _reads_tokens(view, experts, mlp_nodes["x"], anchor):
            return None
        nodes |= mlp_nodes
        names = {role: below(node.target, anchor) for role, node in nodes.items() if node.kind == "parameter"}
        if not anchor or None in names.values():
            return None
        roles = {role: str(name).removesuffix(".weight") for role, name in names.items()}
        inputs = {role: node.id for role, node in nodes.items()}
        return self.bind(captured, graph, inputs, {"y": total.id}, {**constants, **mlp_constants}, anchor, roles)

    @staticmethod
    def _opened(view: View, node: OpNode) -> tuple[OpNode, OpNode, OpNode] | None:
        """``σ(x gᵀ) · mlp`` → (x, mlp, g)."""
        if not view.is_op(node, "mul", 2):
            return None
        for gate, mlp in view.both_orders(node):
            if view.is_op(gate, "sigmoid", 1) and view.is_op(view.operand(gate), "linear", 2):
                product = view.operand(gate)
                weight = view.operand(product, 1)
                if weight.kind == "parameter" and weight.output and weight.output.shape[0] == 1:
                    return view.operand(product), mlp, weight
        return None

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        out = spell_mlp(values, constants)
        if constants["gated"]:
            out = torch.sigmoid(F.linear(values["x"], values["opening"])) * out
        if constants["flat"]:
            out = out.reshape(values["routed"].shape)
        return {"y": values["routed"] + out}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        x = values["x"]
        out = mean_mlp(values, constants)
        if constants["gated"]:
            out = out * ((1 + torch.tanh((x * values["opening"][0]).sum(-1, keepdim=True) / 2)) / 2)
        return {"y": out.reshape(values["routed"].shape) + values["routed"]}

    def gradients(self, match: Match) -> tuple[str, ...]:
        return tuple(match.region.inputs)

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        cut = VariantPredicate(ep_min=2, tp_max=1, device_types=("cuda",))
        return (
            VariantSpec("beside-dispatch", "overlap", "-", cut, not_installable=NOT_OVERLAPPED),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=PART_OF_MODULE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        hidden, width = match.region.spec("down").shape
        gated, apart = match.constants["form"] != "plain", match.constants["form"] == "split"
        made = {"U": 1 + int(gated), "P": 1 + int(apart), "O": int(match.constants["gated"])}
        return {"T": rows_per_token(match, "x") * tokens, "H": hidden, "I": width, **made}

    def unranked(self, match: Match, spec: VariantSpec) -> str:
        """What runs beside the dispatch costs what the dispatch leaves of it, which the plan's step time says."""
        return "what it takes depends on the dispatch it hides behind" if spec.provider == "overlap" else ""


def experts_behind(view: View, value: OpNode, block: str) -> OpNode | None:
    """The one experts block of a module that a value comes from; ``None`` where there is none, or more than one."""
    found = [node for node in _made_inside(view, value, block) if view.is_op(node, "experts")]
    return found[0] if len(found) == 1 else None


def _made_inside(view: View, value: OpNode, block: str) -> Iterator[OpNode]:
    """A value and what it is made of: inside a module, and the first values outside."""
    stack, seen = [value], {value.id}
    while stack:
        node = stack.pop()
        yield node
        if node.kind != "op" or not (node.module_path == block or below(node.module_path, block) is not None):
            continue
        for operand in node.inputs:
            if operand not in seen:
                seen.add(operand)
                stack.append(view.graph.by_id[operand])


def _reads_tokens(view: View, experts: OpNode, x: OpNode, block: str) -> bool:
    """Whether the block's experts are given the tokens that the shared expert reads, or what is made of them."""
    tokens = view.through(x, "reshape")
    return any(node == tokens for node in _made_inside(view, view.operand(experts), block))


def read_mlp(view: View, node: OpNode) -> tuple[dict[str, OpNode], dict[str, Any]] | None:
    """``down(gate-function(x …))`` → its leaves by role and the constants of its spelling."""
    if not view.is_op(node, "linear", 2) or view.operand(node, 1).kind != "parameter":
        return None
    nodes = {"down": view.operand(node, 1)}
    for found in find_gates(view, view.operand(node)):
        made = _projected(view, found)
        if made is not None:
            return nodes | made[0], {"form": made[1], "gate": found.form, **found.constants}
    return None


def _projected(view: View, found: Found) -> tuple[dict[str, OpNode], str] | None:
    """x and the projections that make gate and up."""
    if not GATES[found.form].gated:
        if not view.is_op(found.gate, "linear", 2):
            return None
        made, form = {"x": view.operand(found.gate), "up": view.operand(found.gate, 1)}, "plain"
    elif view.is_op(found.gate, "linear", 2) and view.is_op(found.up, "linear", 2):
        if found.gate.inputs[0] != found.up.inputs[0]:
            return None
        x, gate, up = view.operand(found.gate), view.operand(found.gate, 1), view.operand(found.up, 1)
        made, form = {"x": x, "gate": gate, "up": up}, "split"
    elif view.is_op(found.gate, "slice", 1) and found.gate.inputs == found.up.inputs:
        merged = view.operand(found.gate)
        if not view.is_op(merged, "linear", 2) or merged.output is None or not view.is_op(found.up, "slice", 1):
            return None
        double = merged.output.shape[-1]
        halves = [{"dim": -1, "start": s, "stop": s + double // 2} for s in (0, double // 2)]
        if [found.gate.arguments, found.up.arguments] != halves:
            return None
        made, form = {"x": view.operand(merged), "up": view.operand(merged, 1)}, "merged"
    else:
        return None
    weights = [node for role, node in made.items() if role != "x"]
    return (made, form) if all(node.kind == "parameter" for node in weights) else None


def spell_mlp(values: Tensors, constants: dict[str, Any]) -> torch.Tensor:
    """The MLP as models spell it."""
    x = values["x"]
    if constants["form"] == "split":
        gate, up = F.linear(x, values["gate"]), F.linear(x, values["up"])
    elif constants["form"] == "merged":
        gate, up = F.linear(x, values["up"]).chunk(2, dim=-1)
    else:
        gate = up = F.linear(x, values["up"])
    return F.linear(GATES[constants["gate"]].reference(gate, up, constants), values["down"])


def mean_mlp(values: Tensors, constants: dict[str, Any]) -> torch.Tensor:
    """The MLP by sums over products and the gate's independent formula."""
    up = torch.einsum("...h,ih->...i", values["x"], values["up"])
    if constants["form"] == "split":
        gate = torch.einsum("...h,ih->...i", values["x"], values["gate"])
    elif constants["form"] == "merged":
        width = up.shape[-1] // 2
        gate, up = up[..., :width], up[..., width:]
    else:
        gate = up
    inner = GATES[constants["gate"]].oracle(gate, up, constants)
    return torch.einsum("...i,hi->...h", inner, values["down"])
