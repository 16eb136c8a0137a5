"""The experts block: route rows to experts, two products with a gate between, weight and sum over K.

``y_t = Σ_k w_tk · down_e( gate(up_e x_t) )`` with ``e = index_tk``; the gate is any form of :mod:`gates`.
The layer sees it as one node; what is matched here is the arithmetic inside, in its batched spelling, and the class's
own loop is tested beside it. Stacks may be ``[E, out, in]`` or ``[E, in, out]``, with or without bias, with gate and up
in halves or in every other column.
Legend: T tokens, K experts per token, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import EXPERT_VALUES, EXPERTS_SUFFIX, CapturedGraph
from shardwright.agents.structure.differential import TOLERANCE, compare, float_cases
from shardwright.agents.structure.interpret import KeepFp64, Sizes, choose_sizes
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View
from shardwright.agents.structure.patterns.gates import GATES, find_gates
from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

GATED, PLAIN = "gate_up_proj", "up_proj"
DOWN = "down_proj"
STACKS = (GATED, DOWN)
KERNEL_GATES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "silu": lambda c: {"activation": "swiglu"},
    "silu-wide": lambda c: {"activation": "swiglu"},
    "silu-clamped": lambda c: {"activation": "clamped_swiglu", "limit": c["limit"], "alpha": 1.0, "offset": 0.0},
    "swiglu-sloped": lambda c: {
        "activation": "clamped_swiglu",
        "limit": c["limit"],
        "alpha": c["alpha"],
        "offset": 1.0,
    },
    "situ": lambda c: {"activation": "situ", "limit": c["beta"], "alpha": c["lambda"], "offset": 0.0},
    "relu2": lambda c: {"activation": "relu2"},
}
"""Gate → the expert kernels' own activation with its numbers (``grouped_lora_mlp.contract``)."""
NUMBERS = ("limit", "alpha", "offset")
KERNELS = {"moe_layer": ("T", "K", "E", "H", "I"), "grouped_lora_mlp": ("R", "E", "H", "I")}
"""Operators that take the block, and the sizes that each is counted by."""
OWN_FORM = "workers run experts in their own grouped form with adapters, which is not compiled"
ONLY_SWIGLU = "workers' grouped form computes SwiGLU on [E, out, in] stacks without bias; the block is another"
VALUES = EXPERT_VALUES
MANY = 24
"""Experts beyond which the differential test takes fewer."""


class Experts(Pattern):
    """Routed experts in stacks, ``[E, 2I, H]`` and ``[E, H, I]`` or transposed."""

    name = "experts"
    version = 2
    title = "Experts block"
    contiguous = VALUES
    trainable = ("hidden_states", "top_k_weights")
    lora = "the variants run the module that holds the adapters, or the runtime's own grouped form of it"
    cut = "at ep > 1 the block is cut at the dispatch: router and permute, grouped experts, combine"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        if not captured.kind.endswith(EXPERTS_SUFFIX) or captured.call is None:
            return ()
        named = {node.target.rsplit(".", 1)[-1]: node for node in graph.nodes if node.kind in ("parameter", "input")}
        up = GATED if GATED in named else PLAIN
        biases = {f"{up}_bias", f"{DOWN}_bias"} & set(named)
        if set(named) != {*VALUES, up, DOWN, *biases} or len(biases) == 1:
            return ()
        for constants in self._readings(graph, named, up, bool(biases)):
            inputs = {role: named[role].id for role in (*VALUES, up, DOWN, *sorted(biases))}
            roles = {role: role for role in (up, DOWN, *sorted(biases))}
            match = self.bind(captured, graph, inputs, {"y": graph.outputs[0]}, constants, captured.module_path, roles)
            if match is not None:
                return (match,)
        return ()

    def _readings(self, graph: CanonicalGraph, named: dict[str, OpNode], up: str, biased: bool) -> list[dict[str, Any]]:
        """Constants that fit the two products and what stands between them."""
        view = View(graph)
        products = tuple(view.ops("bmm"))
        merged, down = named[up].output, named[DOWN].output
        if len(products) != 2 or merged is None or down is None or len(merged.shape) != 3:
            return []
        first, second = products
        left = [view.through(view.operand(second, i), "reshape") for i in (0, 1)]
        found = []
        for inner in left:
            for gate in find_gates(view, inner):
                made = self._reading(view, gate.gate, gate.up, GATES[gate.form].gated)
                if made is None or (up == GATED) != GATES[gate.form].gated:
                    continue
                found.append(
                    {
                        "form": "batched",
                        "gate": gate.form,
                        **gate.constants,
                        "split": made,
                        "biased": biased,
                        "transposed": self._transposed(view, first, named[up].id),
                        "clamp": self._clamps_ids(view, named["top_k_index"].id),
                        "experts": down.shape[0],
                        **(KERNEL_GATES[gate.form](gate.constants) if gate.form in KERNEL_GATES else {}),
                    }
                )
        return found

    @staticmethod
    def _reading(view: View, gate: OpNode, up: OpNode, gated: bool) -> str | None:
        """How the product is cut into gate and up: ``halves``, ``columns``, ``none``."""
        if not gated:
            return "none"
        if not (view.is_op(gate, "slice", 1) and view.is_op(up, "slice", 1)) or gate.inputs != up.inputs:
            return None
        width = view.operand(gate).output
        if width is None:
            return None
        double = width.shape[-1]
        halves = [{"dim": -1, "start": s, "stop": s + double // 2} for s in (0, double // 2)]
        columns = [{"dim": -1, "start": s, "stop": double, "step": 2} for s in (0, 1)]
        pieces = [gate.arguments, up.arguments]
        return "halves" if pieces == halves else "columns" if pieces == columns else None

    @staticmethod
    def _transposed(view: View, product: OpNode, stack: str) -> bool:
        """Whether the stack is the right operand of the first product."""
        right = view.operand(product, 1)
        return bool(right.inputs) and stack in right.inputs

    @staticmethod
    def _clamps_ids(view: View, index: str) -> bool:
        for node in view.ops("clamp"):
            source = view.through(node, "clamp", "reshape")
            if source.id == index:
                return True
        return False

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        x, index, weights = (values[v] for v in VALUES)
        up = GATED if GATED in values else PLAIN
        top = index.size(-1)
        rows = x.repeat_interleave(top, dim=0)
        ids = index.reshape(-1)
        if constants["clamp"]:
            ids = ids.clamp(0, constants["experts"] - 1)
        merged = _product(rows, values, up, ids, constants)
        gate, other = _halves(merged, constants["split"])
        inner = GATES[constants["gate"]].reference(gate, other, constants)
        out = _product(inner, values, DOWN, ids, constants)
        weighted = out * weights.reshape(-1).unsqueeze(-1)
        total = weighted.view(x.size(0), top, x.size(-1)).sum(dim=1)
        return {"y": total.to(x.dtype)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """Every expert on every token, weighted by the routing matrix ``[T, E]``."""
        x, index, weights = (values[v] for v in VALUES)
        up = GATED if GATED in values else PLAIN
        letters = ("th,ehi->tei", "tei,eih->teh") if constants["transposed"] else ("th,eih->tei", "tei,ehi->teh")
        experts = values[DOWN].shape[0]
        routing = torch.zeros(x.shape[0], experts, dtype=x.dtype)
        routing = routing.index_put((torch.arange(x.shape[0])[:, None].expand_as(index), index), weights, True)
        both = torch.einsum(letters[0], x, values[up])
        if constants["biased"]:
            both = both + values[f"{up}_bias"]
        gate, other = _halves(both, constants["split"])
        inner = GATES[constants["gate"]].oracle(gate, other, constants)
        out = torch.einsum(letters[1], inner, values[DOWN])
        if constants["biased"]:
            out = out + values[f"{DOWN}_bias"]
        return {"y": torch.einsum("teh,te->th", out, routing)}

    def gradients(self, match: Match) -> tuple[str, ...]:
        return (*self.trainable, *match.parameters)

    def sizes(self, match: Match) -> Sizes:
        """Few experts too, where their number is not also a width, or twice or half of one."""
        small = dict(choose_sizes(match.region).small)
        experts, top = match.constants["experts"], match.region.spec("top_k_index").shape[-1]
        shapes = [match.region.spec(role).shape for role in match.region.inputs]
        widths = {size for shape in shapes for size in (shape[1:] if shape[0] == experts else shape)}
        if experts > MANY and not widths & {experts, 2 * experts, experts // 2}:
            small[experts] = max(2 * top, MANY)
        return Sizes(small)

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Normal routing, one hot expert with all others empty, equal weights (ties), one expert named twice."""
        shapes = {r: sizes.shape(match.region.spec(r).shape) for r in match.region.inputs if r != "top_k_index"}
        cases = float_cases(shapes, seed=11)
        experts, (tokens, top) = shapes[DOWN][0], sizes.shape(match.region.spec("top_k_index").shape)
        generator = torch.Generator().manual_seed(13)
        for case in cases.values():
            scores = torch.rand(tokens, experts, generator=generator)
            case["top_k_index"] = scores.topk(top, dim=-1).indices
        hot, ties, twice = (dict(cases["normal"]) for _ in range(3))
        hot["top_k_index"] = torch.arange(top).expand(tokens, top).contiguous()
        ties["top_k_weights"] = torch.full((tokens, top), 1.0 / top, dtype=torch.float64)
        twice["top_k_index"] = torch.zeros(tokens, top, dtype=torch.long)
        return {**cases, "hot-and-empty-experts": hot, "ties": ties, "one-expert-twice": twice}

    def second_opinion(self, match: Match) -> str:
        """The class's own loop over experts against the oracle, on real fp64 weights of small sizes."""
        module = match.captured.module
        sizes = self.sizes(match)
        cases = self.cases(match, sizes)
        del cases["one-expert-twice"]
        stacks, experts = tuple(match.parameters), match.constants["experts"]

        def loop(values: Tensors) -> Tensors:
            given = {name: values[name] for name in stacks}
            with _eager(module), KeepFp64(), _narrow(module, values[DOWN], match.constants["transposed"]):
                return {"y": torch.func.functional_call(module, given, tuple(values[v] for v in VALUES))}

        def oracle(values: Tensors) -> Tensors:
            return self.oracle(values, match.constants)

        try:
            seen = compare(loop, oracle, cases, self.gradients(match))
        except (IndexError, RuntimeError):
            if sizes.of(experts) == experts:
                raise
            cases = {name: _kept_experts(case, experts, stacks) for name, case in cases.items()}
            seen = compare(loop, oracle, cases, self.gradients(match))
        if seen.error > TOLERANCE:
            raise ArithmeticError(f"the class's own loop differs by {seen.error:.1e} at {seen.where}")
        return f"; the class's own loop over experts too ({seen.values} numbers, {seen.error:.0e})"

    def variants(self) -> tuple[VariantSpec, ...]:
        both = ("cuda", "cpu")
        whole = VariantPredicate(ep_max=1, tp_max=1, device_types=both)
        cut = VariantPredicate(ep_min=2, tp_max=1, device_types=both)
        gpu = ("cuda",)
        return (
            VariantSpec(
                "kernel-whole", "shardwright", "moe_layer", VariantPredicate(ep_max=1, tp_max=1, device_types=gpu)
            ),
            VariantSpec(
                "kernel-cut-at-dispatch",
                "shardwright",
                "grouped_lora_mlp",
                VariantPredicate(ep_min=2, tp_max=1, device_types=gpu),
            ),
            VariantSpec("compile-whole", "compile", "-", whole, not_installable=OWN_FORM),
            VariantSpec("eager-whole", "eager", "-", whole),
            VariantSpec("compile-cut-at-dispatch", "compile", "-", cut, not_installable=OWN_FORM),
            VariantSpec("eager-cut-at-dispatch", "eager", "-", cut),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        if spec.provider != "shardwright":
            return ""
        if "activation" not in match.constants:
            return f"{spec.op} has no {GATES[match.constants['gate']].title}"
        return ""

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        from shardwright.kernels.grouped_lora_mlp import contract

        up, sizes = self._stack(match), {}
        for role in (up, DOWN):
            sizes[role] = torch.empty(match.region.spec(role).shape, dtype=dtype, device="meta")
        activation, layout = _choice(match.constants)
        contract.check_choice(op, activation, layout)
        x = torch.empty(match.region.spec("hidden_states").shape, dtype=dtype, device="meta")
        contract.check_weights(op, x.flatten(0, -2), sizes[up], sizes[DOWN], activation.gated, layout)
        return True

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        if "activation" not in match.constants:
            return None
        from shardwright.kernels.moe_layer.reference import moe_layer_reference

        up, (activation, layout) = self._stack(match), _choice(match.constants)

        def run(values: Tensors) -> Tensors:
            x, ids, weights = (values[v] for v in VALUES)
            stacks, biases = (values[up], values[DOWN]), [values.get(f"{name}_bias") for name in (up, DOWN)]
            return {"y": moe_layer_reference(x, ids, weights, *stacks, None, None, activation, layout, *biases)}

        return run

    @staticmethod
    def _stack(match: Match) -> str:
        return GATED if GATED in match.region.inputs else PLAIN

    def kernel_cost(self, match: Match, spec: VariantSpec, tokens: int) -> tuple[str, dict[str, int]]:
        sizes = self.cost_shape(match, tokens) | {"T": tokens, "K": match.region.spec("top_k_index").shape[-1]}
        return spec.op, {name: sizes[name] for name in KERNELS[spec.op]}

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        experts, one, other = match.region.spec(DOWN).shape
        hidden, width = (other, one) if match.constants["transposed"] else (one, other)
        top = match.region.spec("top_k_index").shape[-1]
        return {"R": tokens * top, "H": hidden, "I": width, "E": experts}


def _choice(constants: dict[str, Any]) -> tuple[Activation, Layout]:
    """The expert kernels' compile-time choice for one match."""
    numbers = [float(constants.get(name, default)) for name, default in zip(NUMBERS, (1.0, 1.0, 0.0), strict=True)]
    activation = Activation(constants["activation"], (numbers[0], numbers[1], numbers[2]))
    return activation, Layout("in_out" if constants["transposed"] else "out_in", constants["split"] == "columns")


def _product(rows: torch.Tensor, values: Tensors, name: str, ids: torch.Tensor, c: dict[str, Any]) -> torch.Tensor:
    """Each row times its expert's matrix, as the library's batched spelling writes it."""
    weight = values[name][ids]
    bias = values[f"{name}_bias"][ids] if c["biased"] else None
    if c["transposed"]:
        out = torch.bmm(rows.unsqueeze(1), weight).squeeze(1)
    else:
        out = torch.bmm(weight, rows.unsqueeze(-1)).squeeze(-1)
    return out if bias is None else out + bias


def _halves(merged: torch.Tensor, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    if split == "none":
        return merged, merged
    if split == "columns":
        return merged[..., ::2], merged[..., 1::2]
    gate, up = merged.chunk(2, dim=-1)
    return gate, up


def _kept_experts(case: Tensors, experts: int, stacks: tuple[str, ...]) -> Tensors:
    """Stacks of the true number of experts: a class may look at each of them by its number."""
    return {
        name: torch.cat([v] * (experts // v.shape[0] + 1))[:experts].contiguous() if name in stacks else v
        for name, v in case.items()
    }


class _narrow:
    """Widths that a class keeps as plain numbers, set to those of the test's small stacks while the context is open."""

    def __init__(self, module: torch.nn.Module, down: torch.Tensor, transposed: bool) -> None:
        one, other = down.shape[1:]
        hidden, width = (other, one) if transposed else (one, other)
        sizes = {"hidden_size": hidden, "hidden_dim": hidden, "intermediate_size": width, "intermediate_dim": width}
        self.module = module
        self.sizes = {name: size for name, size in sizes.items() if isinstance(module.__dict__.get(name), int)}

    def __enter__(self) -> None:
        self.before = {name: self.module.__dict__[name] for name in self.sizes}
        self.module.__dict__.update(self.sizes)

    def __exit__(self, *_: object) -> None:
        self.module.__dict__.update(self.before)


class _eager:
    """The class's own loop, chosen on its config while the context is open."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.config = getattr(module, "config", None)

    def __enter__(self) -> None:
        self.before = getattr(self.config, "_experts_implementation_internal", None)
        if self.config is not None:
            self.config._experts_implementation_internal = "eager"

    def __exit__(self, *_: object) -> None:
        if self.config is not None:
            self.config._experts_implementation_internal = self.before
