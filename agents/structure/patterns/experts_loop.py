"""The experts block as a loop of the class's own: for each expert its rows, its MLP, its share of the sum.

``y_t = Σ_e w_te · down_e( gate(gate_e x_t, up_e x_t) )`` over the experts that chose ``t``. What is matched is the loop
itself, unrolled (:mod:`opaque_loops`). Gate, up and down are matrices of their own, ``[E·out, in]`` or
``[E, out, in]``, each multiplied as it lies or transposed.
Legend: T tokens, K experts per token, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import EXPERT_VALUES, EXPERTS_SUFFIX, CapturedGraph
from shardwright.agents.structure.differential import TOLERANCE, compare, float_cases
from shardwright.agents.structure.interpret import KeepFp64, Sizes, choose_sizes
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.gates import GATES, find_gates
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

MATRICES = ("gate", "up", "down")
OWN_STACKS = (
    "the operator takes gate and up as one stack [E, 2I, H]; here each is a matrix of its own, and no view of one "
    "storage is both"
)
NOT_COMPILED = "torch.compile leaves the loop at every expert, for its rows depend on data"
Found = dict[str, Any]


class ExpertsLoop(Pattern):
    """Routed experts, one after the other."""

    name = "experts_loop"
    version = 1
    title = "Experts block, expert by expert"
    contiguous = ("hidden_states",)
    trainable = ("hidden_states", "top_k_weights", *MATRICES)
    lora = "the only variant that runs is the module itself, with what adapters put on it"
    cut = "expert parallelism does not reach it: its experts are no stacks that ranks can share out"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        experts = sum(1 for _ in view.ops("rows_of"))
        named = {node.target: node for node in graph.nodes if node.kind == "input"}
        if not captured.kind.endswith(EXPERTS_SUFFIX) or not experts or set(named) != set(EXPERT_VALUES):
            return ()
        hot = next(view.ops("one_hot"), None)
        for found in self._one_expert(view, view.through(graph.by_id[graph.outputs[0]], "reshape")):
            names = {role: below(found[role].target, captured.module_path) for role in MATRICES}
            if hot is None or None in names.values():
                continue
            constants = {
                "form": "loop",
                "gate": found["form"],
                **found["constants"],
                "layouts": found["layouts"],
                "experts": experts,
                "classes": hot.arguments.get("num_classes"),
            }
            inputs = {role: named[role].id for role in EXPERT_VALUES} | {role: found[role].id for role in MATRICES}
            roles = {role: str(name) for role, name in names.items()}
            match = self.bind(captured, graph, inputs, {"y": graph.outputs[0]}, constants, captured.module_path, roles)
            if match is not None and self._widths(match) is not None:
                return (match,)
        return ()

    @staticmethod
    def _one_expert(view: View, total: OpNode) -> list[Found]:
        """Readings of the expert that is added last; that the others are alike the re-trace decides."""
        if not view.is_op(total, "index_add", 3) or not view.is_op(view.operand(total, 2), "mul", 2):
            return []
        found = []
        for share, out in view.both_orders(view.operand(total, 2)):
            down = _product(view, out)
            if down is None or not view.is_op(share, "index"):
                continue
            for read in find_gates(view, down[0]):
                gate, up = _product(view, read.gate), _product(view, read.up)
                if gate is None or up is None or not GATES[read.form].gated:
                    continue
                layouts = {role: one[2] for role, one in zip(MATRICES, (gate, up, down), strict=True)}
                matrices = {role: one[1] for role, one in zip(MATRICES, (gate, up, down), strict=True)}
                found.append({"form": read.form, "constants": read.constants, "layouts": layouts, **matrices})
        return found

    @staticmethod
    def _widths(match: Match) -> tuple[int, int] | None:
        """(H, I); ``None`` where the matrices do not hold ``E`` experts of these widths."""
        experts, hidden = match.constants["experts"], match.region.spec("hidden_states").shape[-1]
        whole = {role: match.region.spec(role) for role in MATRICES}
        counts = {role: torch.Size(spec.shape).numel() for role, spec in whole.items()}
        width, rest = divmod(counts["down"], experts * hidden)
        return None if rest or len(set(counts.values())) != 1 else (hidden, width)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        x, index, weights = (values[v] for v in EXPERT_VALUES)
        rows = x.reshape(-1, x.shape[-1])
        total = torch.zeros_like(rows, dtype=rows.dtype, device=rows.device)
        chosen = F.one_hot(index, num_classes=constants["classes"]).permute(2, 1, 0)
        stacks = _stacks(values, constants)
        for expert in range(constants["experts"]):
            place, token = torch.ops.shardwright_capture.rows_of(chosen[expert])
            out = _mlp(rows[token], {role: stack[expert] for role, stack in stacks.items()}, constants)
            total = total.index_add(0, token, out * weights[token, place, None])
        return {"y": total.view(x.shape)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """Every expert on every token, weighted by the routing matrix ``[T, E]``."""
        x, index, weights = (values[v] for v in EXPERT_VALUES)
        rows, stacks = x.reshape(-1, x.shape[-1]), _stacks(values, constants)
        tokens = torch.arange(rows.shape[0])[:, None].expand_as(index)
        empty = torch.zeros(rows.shape[0], constants["experts"], dtype=x.dtype)
        routing = empty.index_put((tokens, index), weights, True)
        letters = {role: "oj" if constants["layouts"][role] == "out_in" else "jo" for role in MATRICES}
        gate, up = (torch.einsum(f"tj,e{letters[role]}->teo", rows, stacks[role]) for role in MATRICES[:2])
        inner = GATES[constants["gate"]].oracle(gate, up, constants)
        out = torch.einsum(f"tej,e{letters['down']}->teo", inner, stacks["down"])
        return {"y": torch.einsum("teo,te->to", out, routing).reshape(x.shape)}

    def sizes(self, match: Match) -> Sizes:
        """Widths alone are made small; a matrix of ``E·I`` rows keeps its ``E``."""
        small, experts = choose_sizes(match.region).small, match.constants["experts"]
        hidden, width = self._widths(match) or (0, 0)
        kept = {size: small[size] for size in (hidden, width) if size in small}
        for one in (hidden, width):
            if experts * one in (hidden, width):
                return Sizes({})
            kept[experts * one] = experts * kept.get(one, one)
        return Sizes(kept)

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Normal routing, some experts without rows, equal weights, one expert named twice by every token."""
        names = [role for role in match.region.inputs if role != "top_k_index"]
        cases = float_cases({role: sizes.shape(match.region.spec(role).shape) for role in names}, seed=29)
        experts, (tokens, top) = match.constants["experts"], match.region.spec("top_k_index").shape
        generator = torch.Generator().manual_seed(31)
        for case in cases.values():
            case["top_k_index"] = torch.rand(tokens, experts, generator=generator).topk(top, dim=-1).indices
        hot, ties, twice = (dict(cases["normal"]) for _ in range(3))
        hot["top_k_index"] = torch.arange(top).expand(tokens, top).contiguous()
        ties["top_k_weights"] = torch.full((tokens, top), 1.0 / top, dtype=torch.float64)
        twice["top_k_index"] = torch.full((tokens, top), experts - 1)
        return {**cases, "hot-and-empty-experts": hot, "ties": ties, "one-expert-twice": twice}

    def second_opinion(self, match: Match) -> str:
        """The class's own forward, which skips experts without rows, against the oracle."""
        module, sizes = match.captured.module, self.sizes(match)

        def loop(values: Tensors) -> Tensors:
            given = {match.roles[role]: values[role] for role in MATRICES}
            with KeepFp64():
                return {"y": torch.func.functional_call(module, given, tuple(values[v] for v in EXPERT_VALUES))}

        with _narrow(module, sizes):
            cases = self.cases(match, sizes)
            seen = compare(loop, lambda values: self.oracle(values, match.constants), cases, self.trainable)
        if seen.error > TOLERANCE:
            raise ArithmeticError(f"the class's own loop differs by {seen.error:.1e} at {seen.where}")
        return f"; the class's own loop over the chosen experts too ({seen.values} numbers, {seen.error:.0e})"

    def variants(self) -> tuple[VariantSpec, ...]:
        ours = VariantPredicate(ep_max=1, tp_max=1, device_types=("cuda",))
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        return (
            VariantSpec("kernel-whole", "shardwright", "moe_layer", ours, not_installable=OWN_STACKS),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=NOT_COMPILED),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        top, (hidden, width) = match.region.spec("top_k_index").shape[-1], self._widths(match) or (0, 0)
        return {"R": tokens * top, "H": hidden, "I": width, "E": match.constants["experts"]}

    def kernel_cost(self, match: Match, spec: VariantSpec, tokens: int) -> tuple[str, dict[str, int]]:
        sizes = self.cost_shape(match, tokens) | {"T": tokens, "K": match.region.spec("top_k_index").shape[-1]}
        return spec.op, {name: sizes[name] for name in ("T", "K", "E", "H", "I")}


@contextmanager
def _narrow(block: nn.Module, sizes: Sizes) -> Iterator[None]:
    """Widths that a block's modules keep as plain numbers, set to those of the test while the context is open."""
    before = [
        (module, name, value)
        for module in block.modules()
        for name, value in vars(module).items()
        if type(value) is int and sizes.of(value) != value
    ]
    try:
        for module, name, value in before:
            setattr(module, name, sizes.of(value))
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _product(view: View, node: OpNode) -> tuple[OpNode, OpNode, str] | None:
    """``x @ W_eᵀ`` or ``x @ W_e`` with one expert's part of a parameter → (x, parameter, layout)."""
    node = view.through(node, "reshape")
    layout = {"linear": "out_in", "matmul": "in_out"}.get(node.target if node.kind == "op" else "")
    if layout is None or len(node.inputs) != 2 or not view.is_op(view.operand(node, 1), "select", 1):
        return None
    stack = view.through(view.operand(view.operand(node, 1)), "reshape")
    return (view.operand(node), stack, layout) if stack.kind == "parameter" else None


def _stacks(values: Tensors, constants: dict[str, Any]) -> Tensors:
    """The matrices as ``[E, out, in]`` or ``[E, in, out]``."""
    hidden, experts, layouts = values["hidden_states"].shape[-1], constants["experts"], constants["layouts"]
    made = {}
    for role in MATRICES:
        first = (layouts[role] == "out_in") == (role == "down")
        shape = (experts, hidden, -1) if first else (experts, -1, hidden)
        made[role] = values[role].view(shape)
    return made


def _mlp(rows: Tensor, one: Tensors, constants: dict[str, Any]) -> Tensor:
    """One expert's MLP."""

    def product(x: Tensor, role: str) -> Tensor:
        return x.matmul(one[role].t() if constants["layouts"][role] == "out_in" else one[role])

    gate, up = product(rows, "gate"), product(rows, "up")
    return product(GATES[constants["gate"]].reference(gate, up, constants), "down")
