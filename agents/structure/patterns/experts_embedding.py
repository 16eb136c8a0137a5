"""Experts of one neuron each, in two embedding tables: ``y_t = Σ_k w_tk · act(a_e · x_t) · b_e`` with ``e = index_tk``.

The two tables are looked up by the same numbers; who chooses them (product keys, a plain top-k) is a region of its own.
Legend: T tokens, K experts per token, E experts, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import float_cases
from shardwright.agents.structure.interpret import Sizes
from shardwright.agents.structure.patterns.base import PART_OF_MODULE, Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.gates import GATES, find_gates
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

NO_OPERATOR = "no operator computes experts in embedding tables"
FORMS = ("silu", "silu-wide", "gelu", "gelu-tanh")
"""Gates that are linear in the routing weight, so that an expert named twice has the sum of its weights."""
TABLES = ("down", "up")


class ExpertsEmbedding(Pattern):
    """Routed experts of one neuron each."""

    name = "experts_embedding"
    version = 1
    title = "Experts in embedding tables"
    contiguous = ("x",)
    trainable = ("x", "weights", *TABLES)
    lora = "the only variant that runs is the module itself, with what adapters put on it"
    cut = "expert parallelism does not reach it: its experts are no stacks that ranks can share out"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        found = [self._at(captured, graph, view, node) for node in view.ops("matmul")]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, total: OpNode) -> Match | None:
        """``total`` is the sum over K: ``[T, 1, K] × [T, K, H]``."""
        up = _looked_up(view, view.operand(total, 1))
        if up is None:
            return None
        for gate in find_gates(view, view.through(view.operand(total), "reshape")):
            dots = view.through(gate.gate, "reshape")
            down = _looked_up(view, view.operand(dots)) if view.is_op(dots, "matmul", 2) else None
            if gate.form not in FORMS or down is None or down[1] != up[1]:
                continue
            nodes = {"x": view.through(view.operand(dots, 1), "reshape"), "ids": up[1], "weights": gate.up}
            nodes |= {"down": down[0], "up": up[0]}
            anchor, y = total.module_path, _whole(graph, total)
            names = {role: below(nodes[role].target, anchor) for role in TABLES}
            if None in names.values():
                continue
            match = self.bind(
                captured,
                graph,
                {role: node.id for role, node in nodes.items()},
                {"y": y.id},
                {"form": "tables", "gate": gate.form, "shape": list(y.output.shape) if y.output else []},
                anchor,
                {role: str(name).removesuffix(".weight") for role, name in names.items()},
            )
            if match is not None and _fits(match):
                return match
        return None

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        ids, weights = values["ids"], values["weights"]
        hidden, (tokens, top) = values["x"].shape[-1], ids.shape
        rows = values["x"].reshape(tokens, hidden, 1)
        dots = torch.matmul(F.embedding(ids, values["down"]), rows).view(tokens, top)
        inner = GATES[constants["gate"]].reference(dots, weights, constants)
        total = torch.matmul(inner.view(tokens, 1, top), F.embedding(ids, values["up"]))
        return {"y": total.view(constants["shape"])}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """Every neuron on every token, weighted by the routing matrix ``[T, E]``."""
        x, ids, down, up = (values[role] for role in ("x", "ids", *TABLES))
        tokens = torch.arange(ids.shape[0])[:, None].expand_as(ids)
        empty = torch.zeros(ids.shape[0], down.shape[0], dtype=x.dtype)
        routing = empty.index_put((tokens, ids), values["weights"], True)
        dots = torch.einsum("th,eh->te", x.reshape(ids.shape[0], -1), down)
        inner = GATES[constants["gate"]].oracle(dots, routing, constants)
        hidden = (*constants["shape"][:-1], x.shape[-1])
        return {"y": torch.einsum("te,eh->th", inner, up).reshape(hidden)}

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Normal choices, one hot set of experts, equal weights, one expert named twice by every token."""
        shapes = {role: sizes.shape(match.region.spec(role).shape) for role in match.region.inputs if role != "ids"}
        cases = float_cases(shapes, seed=37)
        experts, (tokens, top) = shapes["down"][0], match.region.spec("ids").shape
        generator = torch.Generator().manual_seed(41)
        for case in cases.values():
            case["ids"] = torch.randint(experts, (tokens, top), generator=generator)
        hot, ties, twice = (dict(cases["normal"]) for _ in range(3))
        hot["ids"] = (torch.arange(top) % experts).expand(tokens, top).contiguous()
        ties["weights"] = torch.full((tokens, top), 1.0 / top, dtype=torch.float64)
        twice["ids"] = torch.full((tokens, top), experts - 1)
        return {**cases, "hot-experts": hot, "ties": ties, "one-expert-twice": twice}

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        return (
            VariantSpec("compile", "compile", "-", anywhere, not_installable=f"{NO_OPERATOR}; {PART_OF_MODULE}"),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        experts, hidden = match.region.spec("down").shape
        return {"T": tokens, "K": match.region.spec("ids").shape[-1], "H": hidden, "E": experts}


def _looked_up(view: View, node: OpNode) -> tuple[OpNode, OpNode] | None:
    """An embedding of a parameter → (table, numbers)."""
    if not view.is_op(node, "embedding", 2) or view.operand(node).kind != "parameter":
        return None
    return view.operand(node), view.operand(node, 1)


def _whole(graph: CanonicalGraph, total: OpNode) -> OpNode:
    """The sum in the sizes in which it is read: behind its reshape where nothing else reads it."""
    readers = graph.users(total.id)
    alone = len(readers) == 1 and total.id not in graph.outputs
    return readers[0] if alone and readers[0].target == "reshape" else total


def _fits(match: Match) -> bool:
    """Whether the sizes are those of K experts of T tokens, with tables of one size."""
    ids, tables = match.region.spec("ids").shape, {match.region.spec(role).shape for role in TABLES}
    (experts, hidden), rows = next(iter(tables)), match.region.spec("x").shape
    tokens = torch.Size(rows[:-1]).numel()
    return len(tables) == 1 and len(ids) == 2 and ids[0] == tokens and rows[-1] == hidden and experts > 0
