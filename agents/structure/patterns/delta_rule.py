"""The gated delta rule of linear attention (KDA, GatedDeltaNet), from decays to results.

``S ← diag(e^g) S;  S ← S + β k̂ (v − k̂ᵀS)ᵀ;  o = Sᵀ q̂`` per head, with q̂ and k̂ of unit length and q̂ scaled by
``K^(−1/2)``. Forms: ``channels`` has a decay for each key channel (KDA), ``heads`` one for each head (GatedDeltaNet).
Convolutions, gates before, and the gated norm after lie outside: workers leave them to the layer's own forward. The
whole layer is ``delta_rule_layer``; where that cannot be read, the constant ``alone_because`` says why.
Legend: B batch, T tokens, H key heads, HV value heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import TOLERANCE, compare
from shardwright.agents.structure.interpret import KeepFp64, Sizes
from shardwright.agents.structure.opaque_rules import run_rule
from shardwright.agents.structure.patterns.base import PART_OF_MODULE, Match, Pattern, Tensors, VariantSpec, View
from shardwright.agents.structure.patterns.delta_rule_reading import Unread, read_layer
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

ROLES = ("q", "k", "v", "g", "beta")
LONG = 70
"""Tokens of the second opinion: across the 64 of a family's chunk."""
LEAST = 1e-6
OPERATOR = {"channels": "kda", "heads": "gated_delta"}
"""Form → the operator that computes it, decays given."""


class DeltaRule(Pattern):
    """The recurrence as one operator."""

    name = "delta_rule"
    version = 1
    title = "Gated delta rule"
    trainable = ROLES
    reads_views = True

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        found = [self._at(captured, graph, node) for node in View(graph).ops("delta_rule")]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, node: OpNode) -> Match | None:
        specs = [graph.by_id[i].output for i in node.inputs]
        if len(specs) != len(ROLES) or any(spec is None for spec in specs) or not node.arguments.get("unit"):
            return None
        ranks = [len(spec.shape) for spec in specs if spec is not None]
        if ranks[:3] != [4, 4, 4] or ranks[3] not in (3, 4) or ranks[4] != 3:
            return None
        constants = {
            "form": "channels" if ranks[3] == 4 else "heads",
            "rule": node.arguments["rule"],
            "decays": "given",
            **_alone(captured, graph, node),
        }
        inputs = dict(zip(ROLES, node.inputs, strict=True))
        return self.bind(captured, graph, inputs, {"o": node.id}, constants, node.module_path, {})

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        given = [values[role] for role in ROLES]
        return {"o": torch.ops.shardwright_capture.delta_rule(*given, constants["rule"], True)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return {"o": recurrence(*(values[role] for role in ROLES))}

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Decays from none to nearly all, rows of zeros, β at 0 and 1, one loud token."""
        keys, values = match.region.spec("q").shape[2], match.region.spec("v").shape[2]
        return rule_cases(_few(match.constants["form"], values // keys, 2, 9))

    def second_opinion(self, match: Match) -> str:
        """The family's own function across the edge of a chunk."""
        return rule_second_opinion(match.constants)

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, device_types=("cuda",))
        return (
            VariantSpec("kernel", "shardwright", "kda", kernel, forms=("channels",)),
            VariantSpec("kernel-heads", "shardwright", "gated_delta", kernel, forms=("heads",)),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=PART_OF_MODULE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def must_verify(self, match: Match, spec: VariantSpec) -> tuple[str, ...]:
        """Our kernels stand in only where a device has verified these very sources."""
        return (spec.op,) if spec.provider == "shardwright" else ()

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        from shardwright.kernels.kda.reference import kda_recurrent_reference

        def run(values: Tensors) -> Tensors:
            q, k, v, g, beta = (values[role] for role in ROLES)
            g = g if g.dim() == 4 else g.unsqueeze(-1).expand(*g.shape, q.shape[-1])
            o, _ = kda_recurrent_reference(q, k, v, g, beta, gate="given", beta_sigmoid=False)
            return {"o": o}

        return run

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        def like(role: str) -> Tensor:
            return torch.empty(match.region.spec(role).shape, dtype=dtype, device="meta")

        q, k, v, g, beta = (like(role) for role in ROLES)
        if op == "gated_delta":
            from shardwright.kernels.gated_delta import contract as of_heads

            of_heads.check_static(q, k, v, g, beta, None, None, None, gate="given", count=q.shape[0])
            return True
        from shardwright.kernels.kda import contract

        bound = contract.LOWEST
        contract.check_static(q, k, v, g, beta, None, None, None, gate="given", lower_bound=bound, count=q.shape[0])
        return True

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        q, v = match.region.spec("q").shape, match.region.spec("v").shape
        channels = int(match.constants["form"] == "channels")
        return {"T": tokens, "H": q[2], "HV": v[2], "K": q[3], "V": v[3], "channels": channels}

    def kernel_cost(self, match: Match, spec: VariantSpec, tokens: int) -> tuple[str, dict[str, int]]:
        return spec.op, rule_sizes(self.cost_shape(match, tokens))

    def unranked(self, match: Match, spec: VariantSpec) -> str:
        return "" if spec.computes(match.constants) else f"computes {' or '.join(spec.forms)}"


def _alone(captured: CapturedGraph, graph: CanonicalGraph, node: OpNode) -> dict[str, str]:
    """Why the recurrence stands alone: what of its layer is not spelled as the operators around it compute."""
    from shardwright.agents.structure.patterns.gated_rms_norm import GatedRmsNorm

    try:
        read_layer(View(graph), node, GatedRmsNorm().find(captured, graph))
    except Unread as error:
        return {"alone_because": str(error)}
    return {}


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Token by token, the state as a matrix [K, V] of every batch and head → ``[B, T, HV, V]``; q, k of any length."""
    repeats = v.shape[2] // q.shape[2]
    q, k = (_unit(x).repeat_interleave(repeats, dim=2) for x in (q, k))
    decay = torch.exp(g if g.dim() == 4 else g.unsqueeze(-1))
    state, out = torch.zeros(*v.shape[:1], v.shape[2], q.shape[-1], v.shape[-1], dtype=v.dtype), []
    for t in range(v.shape[1]):
        state = decay[:, t].unsqueeze(-1) * state
        error = v[:, t] - (k[:, t].unsqueeze(-1) * state).sum(-2)
        state = state + (beta[:, t].unsqueeze(-1) * k[:, t]).unsqueeze(-1) * error.unsqueeze(-2)
        out.append((q[:, t].unsqueeze(-1) * state).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(out, dim=1)


def rule_sizes(shape: dict[str, int]) -> dict[str, int]:
    """Sizes of a rule as its operator's suite names them: one document; value heads where a head has one decay."""
    names = ("T", "H", "K", "V") if shape["channels"] and shape["H"] == shape["HV"] else ("T", "H", "HV", "K", "V")
    return {**{name: shape[name] for name in names}, "docs": 1}


ASSEMBLED = frozenset(("kda", "gated_delta", "short_conv"))
"""Operators for which an assembler is known to have made wrong code of right source (docs/kernels-kda.md): a device has
to have verified them before a plan may run them."""


def rule_second_opinion(constants: dict[str, Any]) -> str:
    """Compare a family's function with the recurrence over ``LONG`` tokens; what was compared.

    Args:
        constants: a match's: ``rule``, ``form``, and whether the rule itself divides (``unit``, the default).

    Raises:
        ArithmeticError: they differ.
    """
    unit = bool(constants.get("unit", True))
    cases = {"long": rule_cases(_few(constants["form"], 1, 1, LONG))["normal"]}

    def own(values: Tensors) -> Tensors:
        given = [values[role] for role in ROLES]
        if not unit:
            given[0], given[1] = _unit(given[0]) * given[0].shape[-1] ** -0.5, _unit(given[1])
        with KeepFp64():
            return {"o": run_rule(constants["rule"], tuple(given), unit=unit)}

    seen = compare(own, lambda v: {"o": recurrence(*(v[role] for role in ROLES))}, cases, ROLES)
    if seen.error > TOLERANCE:
        raise ArithmeticError(f"over {LONG} tokens the family's function differs by {seen.error:.1e}")
    return f"; over {LONG} tokens too ({seen.values} numbers, {seen.error:.0e})"


def _few(form: str, ratio: int, batch: int, tokens: int) -> dict[str, tuple[int, ...]]:
    """Sizes of a small recurrence with a region's ratio of value heads to key heads; the function takes any."""
    heads, width = 2, 8
    q, v, beta = (
        (batch, tokens, heads, width),
        (batch, tokens, heads * ratio, width),
        (batch, tokens, heads * ratio),
    )
    g = (*beta, width) if form == "channels" else beta
    return {"q": q, "k": q, "v": v, "g": g, "beta": beta}


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + LEAST)


def rule_cases(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensors]:
    """Inputs of the recurrence by name of the case."""
    generator = torch.Generator().manual_seed(37)

    def normal(scale: float = 1.0) -> Tensors:
        made = {r: torch.randn(s, generator=generator, dtype=torch.float64) for r, s in shapes.items()}
        made["g"] = -scale * torch.rand(shapes["g"], generator=generator, dtype=torch.float64)
        made["beta"] = torch.rand(shapes["beta"], generator=generator, dtype=torch.float64)
        return made

    cases = {"normal": normal(), "no-decay": normal(1e-9), "strong-decay": normal(5.0), "edges": normal()}
    cases["edges"]["beta"] = cases["edges"]["beta"].round()
    cases["loud-token"] = normal()
    cases["loud-token"]["v"][:, 1] *= 1e3
    cases["zero-key"] = normal()
    cases["zero-key"]["k"][:, 2] = 0
    return cases
