"""The experts block: route rows to experts, two products with a gate between, weight and sum over K.

``y_t = Σ_k w_tk · down_e( gate(up_e x_t) )`` with ``e = index_tk``; the gate is any form of :mod:`gates`.
The layer sees it as one node; what is matched here is the arithmetic inside, in its batched spelling, and the class's
own loop is tested beside it. Stacks may be ``[E, out, in]`` or ``[E, in, out]``, with or without bias, with gate and up
in halves or in every other column. How the graph is read: :mod:`experts_reading`; the operators that take the block:
:mod:`experts_kernels`, :mod:`experts_packed`.
Legend: T tokens, K experts per token, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import EXPERT_VALUES, EXPERTS_SUFFIX, CapturedGraph
from shardwright.agents.structure.differential import float_cases
from shardwright.agents.structure.interpret import Sizes, choose_sizes
from shardwright.agents.structure.patterns import experts_kernels, experts_packed
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec
from shardwright.agents.structure.patterns.experts_class import own_loop_agrees
from shardwright.agents.structure.patterns.experts_kernels import DOWN, GATED, PLAIN
from shardwright.agents.structure.patterns.experts_reading import readings
from shardwright.agents.structure.patterns.gates import GATES

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
        for constants in readings(graph, named, up, DOWN, bool(biases)):
            inputs = {role: named[role].id for role in (*VALUES, up, DOWN, *sorted(biases))}
            roles = {role: role for role in (up, DOWN, *sorted(biases))}
            match = self.bind(captured, graph, inputs, {"y": graph.outputs[0]}, constants, captured.module_path, roles)
            if match is not None:
                return (match,)
        return ()

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
        """The class's own loop over experts, and the packed operator's reference, against the oracle."""
        sizes = self.sizes(match)
        cases = self.cases(match, sizes)
        del cases["one-expert-twice"]

        def oracle(values: Tensors) -> Tensors:
            return self.oracle(values, match.constants)

        own = own_loop_agrees(match, sizes, cases, oracle, self.gradients(match))
        return own + experts_packed.packed_agrees(match, oracle)

    def variants(self) -> tuple[VariantSpec, ...]:
        return (*experts_kernels.decoded_variants(), *experts_packed.packed_variants())

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        if spec.provider != "shardwright":
            return ""
        if spec.packed:
            return experts_packed.refuses_packed(match, experts_packed.kind_of(spec))
        return experts_kernels.no_activation(match, spec.op)

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        if op == experts_packed.OP:
            experts_packed.check_packed(dtype)
        else:
            experts_kernels.check_decoded(match, op, dtype)
        return True

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        return experts_kernels.layer_reference(match)

    def kernel_cost(self, match: Match, spec: VariantSpec, tokens: int) -> tuple[str, dict[str, int]]:
        if spec.packed:
            return spec.op, experts_packed.counted_packed(match, experts_packed.kind_of(spec), tokens)
        return spec.op, experts_kernels.counted_by(match, spec.op, tokens)

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        return experts_kernels.block_sizes(match, tokens)


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
