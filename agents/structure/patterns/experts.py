"""The experts block: route rows to experts, two products with SwiGLU between, weight and sum over K.

``y_t = Σ_k w_tk · down_e( silu(gate_e x_t) · up_e x_t )`` with ``e = index_tk``.
The layer sees it as one node; what is matched here is the arithmetic inside, in its batched spelling, and the class's
own loop is tested beside it.
Legend: T tokens, K experts per token, E experts, H hidden, I expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import EXPERT_VALUES, EXPERTS_SUFFIX, CapturedGraph
from shardwright.agents.structure.differential import TOLERANCE, compare, float_cases
from shardwright.agents.structure.interpret import Sizes, choose_sizes
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View
from shardwright.schemas.fusion import VariantPredicate

STACKS = ("gate_up_proj", "down_proj")
OWN_FORM = "workers run experts in their own grouped form with adapters, which is not compiled"
VALUES = EXPERT_VALUES


class Experts(Pattern):
    """Routed SwiGLU experts with merged gate and up, ``[E, 2I, H]`` and ``[E, H, I]``, without bias."""

    name = "experts"
    version = 1
    title = "Experts block"
    contiguous = (*VALUES, *STACKS)
    trainable = ("hidden_states", "top_k_weights", *STACKS)
    lora = "the variants run the module that holds the adapters, or the runtime's own grouped form of it"
    cut = "at ep > 1 the block is cut at the dispatch: router and permute, grouped experts, combine"

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        if not captured.kind.endswith(EXPERTS_SUFFIX) or captured.call is None:
            return ()
        named = {node.target.rsplit(".", 1)[-1]: node for node in graph.nodes if node.kind in ("parameter", "input")}
        if set(named) != {*VALUES, *STACKS}:
            return ()
        merged, down = named["gate_up_proj"].output, named["down_proj"].output
        view = View(graph)
        if merged is None or down is None or not any(view.ops("silu")) or len(tuple(view.ops("bmm"))) != 2:
            return ()
        experts, double, hidden = merged.shape
        if down.shape != (experts, hidden, double // 2):
            return ()
        clamped = any(view.ops("clamp"))
        constants = {"form": "batched", "clamp": clamped, "experts": experts}
        inputs = {role: named[role].id for role in (*VALUES, *STACKS)}
        anchor = captured.module_path
        roles = {role: role for role in STACKS}
        match = self.bind(captured, graph, inputs, {"y": graph.outputs[0]}, constants, anchor, roles)
        return () if match is None else (match,)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        x, index, weights = (values[v] for v in VALUES)
        top = index.size(-1)
        rows = x.repeat_interleave(top, dim=0)
        ids = index.reshape(-1)
        if constants["clamp"]:
            ids = ids.clamp(0, constants["experts"] - 1)
        merged = torch.bmm(values["gate_up_proj"][ids], rows.unsqueeze(-1)).squeeze(-1)
        gate, up = merged.chunk(2, dim=-1)
        inner = F.silu(gate) * up
        out = torch.bmm(values["down_proj"][ids], inner.unsqueeze(-1)).squeeze(-1)
        weighted = out * weights.reshape(-1).unsqueeze(-1)
        total = weighted.view(x.size(0), top, x.size(-1)).sum(dim=1)
        return {"y": total.to(x.dtype)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """Every expert on every token, weighted by the routing matrix ``[T, E]``."""
        x, index, weights = (values[v] for v in VALUES)
        merged, down = values["gate_up_proj"], values["down_proj"]
        routing = torch.zeros(x.shape[0], merged.shape[0], dtype=x.dtype)
        routing = routing.index_put((torch.arange(x.shape[0])[:, None].expand_as(index), index), weights, True)
        both = torch.einsum("th,eih->tei", x, merged)
        width = down.shape[-1]
        inner = both[..., width:] * both[..., :width] * torch.sigmoid(both[..., :width])
        return {"y": torch.einsum("tei,ehi,te->th", inner, down, routing)}

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Normal routing, one hot expert with all others empty, equal weights (ties), one expert named twice."""
        shapes = {r: sizes.shape(match.region.spec(r).shape) for r in match.region.inputs if r != "top_k_index"}
        cases = float_cases(shapes, seed=11)
        experts, (tokens, top) = shapes["gate_up_proj"][0], sizes.shape(match.region.spec("top_k_index").shape)
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
        sizes = choose_sizes(match.region)
        cases = self.cases(match, sizes)
        if sizes.of(match.constants["experts"]) != match.constants["experts"]:
            cases = {name: _kept_experts(case, match.constants["experts"]) for name, case in cases.items()}

        def loop(values: Tensors) -> Tensors:
            stacks = {name: values[name] for name in STACKS}
            with _eager(module):
                return {"y": torch.func.functional_call(module, stacks, tuple(values[v] for v in VALUES))}

        del cases["one-expert-twice"]
        seen = compare(loop, lambda v: self.oracle(v, match.constants), cases, self.trainable)
        if seen.error > TOLERANCE:
            raise ArithmeticError(f"the class's own loop differs by {seen.error:.1e} at {seen.where}")
        return f"; the class's own loop over experts too ({seen.values} numbers, {seen.error:.0e})"

    def variants(self) -> tuple[VariantSpec, ...]:
        both = ("cuda", "cpu")
        whole = VariantPredicate(ep_max=1, tp_max=1, device_types=both)
        cut = VariantPredicate(ep_min=2, tp_max=1, device_types=both)
        return (
            VariantSpec("compile-whole", "compile", "-", whole, not_installable=OWN_FORM),
            VariantSpec("eager-whole", "eager", "-", whole),
            VariantSpec("compile-cut-at-dispatch", "compile", "-", cut, not_installable=OWN_FORM),
            VariantSpec("eager-cut-at-dispatch", "eager", "-", cut),
        )

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        experts, hidden, width = match.region.spec("down_proj").shape
        top = match.region.spec("top_k_index").shape[-1]
        return {"R": tokens * top, "H": hidden, "I": width, "E": experts}


def _kept_experts(case: Tensors, experts: int) -> Tensors:
    """Stacks of the true number of experts: the class may size its masks by it."""
    return {
        name: torch.cat([v] * (experts // v.shape[0] + 1))[:experts].contiguous() if name in STACKS else v
        for name, v in case.items()
    }


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
