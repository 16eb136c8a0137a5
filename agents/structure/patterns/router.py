"""The router: product with the router's matrix, scores, choice of K experts, their weights.

The choice is a set: experts of equal score are anyone's order, in the models too. So results are compared as the
routing matrix ``[T, E]``, and by their sorted weights where scores tie across the edge of the choice.
Legend: T tokens, E experts, K chosen experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CAPTURE_ERRORS, CapturedGraph
from shardwright.agents.structure.differential import TOLERANCE
from shardwright.agents.structure.interpret import Fp64Region, Sizes, choose_sizes
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.router_reading import Reading, dense_router, read_router, spell_router
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode, TensorSpec

TINY = 1e-20
"""ε that the operator adds to a sum of weights; without one the sum is the same in every row that has a weight."""
LEAVES = ("weight", "bias", "offset")
"""Roles besides x: the matrix, what is added to scores before the choice, what is added to the product."""
NOT_COMPILED = "workers compile whole modules, and a router's choice under checkpointing is kept by the module itself"


class Router(Pattern):
    """Scores, choice and weights as one operator."""

    name = "router"
    version = 1
    title = "Router"
    dtypes = ("bfloat16", "float32", "float16")
    contiguous = ("x", "weight")
    strided = ("x",)
    trainable = ("x", "weight")

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        found = [self._at(captured, graph, view, top) for top in view.ops("topk")]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, view: View, top: Any) -> Match | None:
        read = read_router(view, top)
        if read is None:
            return None
        anchor = top.module_path
        roles, inputs = {}, {"x": read.nodes["x"].id}
        for role in LEAVES:
            if role in read.nodes:
                inputs[role] = read.nodes[role].id
                roles[role] = below(read.nodes[role].target, anchor) or read.nodes[role].target
        outputs = {role: read.nodes[role].id for role in ("weights", "experts")}
        constants = {"form": read.constants["order"], **read.constants}
        if "bias" in read.nodes and below(read.nodes["bias"].target, anchor) is None:
            constants["bias_argument"] = True
        if _returns_wide_logits(captured, anchor, read):
            constants["logits_cast"] = "float32"
        return self.bind(captured, graph, inputs, outputs, constants, anchor, roles)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return spell_router(values, constants)

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return {"routing": dense_router(values, constants)}

    def comparable(self, results: Tensors, match: Match) -> Tensors:
        return {"routing": _dense(results["weights"], results["experts"], match.region.spec("weight").shape[0])}

    def gradients(self, match: Match) -> tuple[str, ...]:
        return (*self.trainable, *({"offset"} & set(match.roles)))

    def sizes(self, match: Match) -> Sizes:
        """The number of experts as it is: groups divide it."""
        experts, hidden = match.region.spec("weight").shape
        small = choose_sizes(match.region).small
        return Sizes({hidden: small[hidden]} if hidden in small and hidden != experts else {})

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Scores without ties, of several spreads; ties are the matter of the second opinion."""
        shapes = {role: sizes.shape(match.region.spec(role).shape) for role in match.region.inputs}
        generator = torch.Generator().manual_seed(23)

        def normal(spread: float) -> Tensors:
            made = {r: torch.randn(s, generator=generator, dtype=torch.float64) for r, s in shapes.items()}
            made["weight"] *= spread / shapes["weight"][-1] ** 0.5
            for role in {"bias", "offset"} & set(made):
                made[role] *= 0.1
            return made

        cases = {"normal": normal(1.0), "spread": normal(4.0), "flat": normal(1e-3), "one-hot": normal(1.0)}
        tokens, hidden = shapes["x"]
        cases["one-hot"]["x"] = torch.eye(hidden, dtype=torch.float64)[torch.arange(tokens) % hidden].contiguous()
        cases["non-contiguous"] = normal(1.0)
        wide = torch.zeros((tokens, 2 * hidden), dtype=torch.float64)
        cases["non-contiguous"]["x"] = wide[:, ::2].copy_(cases["non-contiguous"]["x"])
        return cases

    def second_opinion(self, match: Match) -> str:
        """Experts in pairs of equal scores: some pair straddles the edge of the choice."""
        sizes = self.sizes(match)
        values = self.cases(match, sizes)["normal"]
        for role in LEAVES:
            if role in values:
                pairs = values[role].reshape(-1, values["weight"].shape[-1] if role == "weight" else 1)
                pairs[1::2] = pairs[0::2][: pairs[1::2].shape[0]]
                values[role] = pairs.reshape(values[role].shape)
        seen = Fp64Region(match.region, sizes)(values)
        kernel = self.kernel_reference(match)
        other = kernel(values)["routing"] if kernel is not None else None
        if other is None:
            return ""
        k = match.constants["k"]
        kept = other.sort(-1, descending=True).values[:, :k]
        distance = float((seen["weights"].sort(-1, descending=True).values - kept).abs().max())
        if distance > TOLERANCE or bool((seen["experts"].sort(-1).values.diff(dim=-1) == 0).any()):
            raise ArithmeticError(f"under ties the sorted weights differ by {distance:.1e}")
        return f"; sorted weights under ties at the edge of the choice too ({kept.numel()} numbers)"

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, lora_inside=False, device_types=("cuda",))
        return (
            VariantSpec("kernel", "shardwright", "router", kernel),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=NOT_COMPILED),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        if spec.provider != "shardwright":
            return ""
        return _meaning(match.constants) or _boundary(match)

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        if _meaning(match.constants):
            return None
        from shardwright.kernels.router.reference import router_reference

        settings, experts = _settings(match.constants), match.region.spec("weight").shape[0]

        def run(values: Tensors) -> Tensors:
            logits = values["x"] @ values["weight"].t()
            logits = logits + values["offset"] if "offset" in values else logits
            bias = values["bias"].reshape(-1) if "bias" in values else None
            weights, ids, _, _ = router_reference(logits, bias, **settings)
            return {"routing": _dense(weights, ids, experts)}

        return run

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        from shardwright.kernels.router import contract

        tokens, experts = match.region.spec("x").shape[0], match.region.spec("weight").shape[0]
        wide = match.constants["logits_dtype"] == "float32"
        logits = torch.empty(tokens, experts, dtype=torch.float32 if wide else dtype, device="meta")
        bias = None
        if "bias" in match.region.inputs:
            kept = getattr(torch, match.region.spec("bias").dtype)
            bias = torch.empty(experts, dtype=kept, device="meta")
        settings = _settings(match.constants)
        del settings["renormalise"]
        contract.check_static(logits, bias, **settings)
        return True

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        return {"T": tokens, "E": match.region.spec("weight").shape[0], "k": match.constants["k"]}


def _dense(weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    """``[T, K]`` weights at their experts' places in ``[T, E]``."""
    empty = torch.zeros(weights.shape[0], experts, dtype=weights.dtype)
    return empty.scatter_add(1, ids, weights)


def _settings(constants: dict[str, Any]) -> dict[str, Any]:
    """The operator's settings for one match."""
    return {
        "k": constants["k"],
        "scoring": constants["scoring"],
        "groups": constants["groups"],
        "groups_kept": constants["groups_kept"],
        "group_score": constants["group_score"],
        "renormalise": constants["renormalise"],
        "scale": constants["scale"],
    }


def _meaning(c: dict[str, Any]) -> str:
    """Where the operator computes something else; empty where it computes the same."""
    if c["order"] == "logits-first" and c["scoring"] != "softmax":
        return "the operator's weights are renormalised or scored over all experts; here the chosen logits are gated"
    if c["order"] == "logits-first" and c["bias"]:
        return "the operator adds its bias to scores; here it is added to logits"
    if c["eps"] > TINY or c["least"] > 0:
        return f"the sum of weights is kept above {max(c['eps'], c['least']):g}; the operator adds {TINY:g}"
    if c["groups_kept"] < c["groups"] and c["fill"] != "-inf" and c["bias"]:
        return "experts outside the best groups keep a score of 0, which may be chosen; the operator drops them"
    if c["score_dtype"] != "float32" and c["order"] == "scores-first":
        return f"scores are rounded to {c['score_dtype']} before the choice; the operator compares fp32 scores"
    return ""


def _boundary(match: Match) -> str:
    """Why workers cannot put the operator in place of the module's forward; empty where they can."""
    c = match.constants
    given = c.get("bias_argument", False)
    for role, name in match.parameters.items():
        if below(name, match.anchor) is None and not (given and role == "bias"):
            return f"the {role} {name} does not lie in {match.anchor}"
    if c["logits_dtype"] == "float32" and not c["x_cast"] and match.region.spec("x").dtype != "float32":
        return "the product is fp32 without a cast of its input"
    if c.get("logits_cast") == "float32" and c["weights_dtype"] != "float32":
        return f"the module returns fp32 logits and {c['weights_dtype']} weights; workers return fp32"
    if c["logits_dtype"] == "float32" and c["weights_dtype"] != "float32":
        return f"the module multiplies in fp32 and returns {c['weights_dtype']} weights; workers return fp32"
    return _interface(_module(match.captured, match.anchor), match)


def _module(captured: CapturedGraph, anchor: str) -> nn.Module:
    return captured.module.get_submodule(anchor.removeprefix(captured.module_path).removeprefix("."))


def _returns_wide_logits(captured: CapturedGraph, anchor: str, read: Reading) -> bool:
    """Whether the module returns fp32 logits of a narrower product."""
    x, logits = read.nodes["x"].output, read.nodes["logits"].output
    if x is None or logits is None or logits.dtype == "float32":
        return False
    try:
        seen = _call(_module(captured, anchor), x, read.nodes.get("bias"), anchor)
    except CAPTURE_ERRORS:
        return False
    first = seen[0] if isinstance(seen, tuple) and seen else None
    return isinstance(first, Tensor) and first.dtype == torch.float32 and first.shape[-1] == logits.shape[-1]


def _call(module: nn.Module, x: TensorSpec, bias: OpNode | None, anchor: str) -> Any:
    """The router's results for three tokens on meta; a bias that is not the module's own is its second argument."""
    values = [torch.empty(3, x.shape[-1], dtype=getattr(torch, x.dtype), device="meta")]
    if bias is not None and bias.output is not None and below(bias.target, anchor) is None:
        values.append(torch.empty(bias.output.shape, dtype=getattr(torch, bias.output.dtype), device="meta"))
    return module(*values)


def _interface(module: nn.Module, match: Match) -> str:
    """The forward must take hidden states, and a bias that is not its own, and return (logits [T, E], weights [T, K],
    experts [T, K])."""
    experts = match.region.spec("weight").shape[0]
    bias = match.region.canonical.by_id[match.region.inputs["bias"]] if "bias" in match.region.inputs else None
    try:
        seen = _call(module, match.region.spec("x"), bias, match.anchor)
    except CAPTURE_ERRORS as error:
        lines = str(error).strip().splitlines() or [""]
        given = "hidden states and a bias" if match.constants.get("bias_argument") else "hidden states alone"
        return f"{match.anchor} cannot be called with {given}: {lines[0]}"[:200]
    k = match.constants["k"]
    wanted = [(3, experts), (3, k), (3, k)]
    if not isinstance(seen, tuple) or [tuple(getattr(v, "shape", ())) for v in seen] != wanted:
        return f"{match.anchor} does not return logits, weights and experts in this order"
    floating = [value.is_floating_point() for value in seen]
    if floating != [True, True, False] or str(seen[1].dtype) != f"torch.{match.constants['weights_dtype']}":
        return f"{match.anchor} does not return logits, weights and experts in this order"
    return ""
