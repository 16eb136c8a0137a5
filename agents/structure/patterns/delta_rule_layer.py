"""Delta-rule linear attention (KDA, GatedDeltaNet) as one region, from its projections to its output projection.

Short causal convolution and SiLU, decay gate, β, unit length of q and k, recurrence, gated RMSNorm. Projections and
their adapters stay outside. Forms: ``channels`` has a decay for each key channel (KDA), ``heads`` one for each head
(GatedDeltaNet). What is spelled otherwise is left to ``delta_rule``, the recurrence alone.
Legend: B batch, T tokens, H key heads, HV value heads, K key width, V value width, C channels, J taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.interpret import Sizes
from shardwright.agents.structure.patterns.base import PART_OF_MODULE, Match, Pattern, Tensors, VariantSpec, View
from shardwright.agents.structure.patterns.delta_rule import ASSEMBLED, rule_second_opinion
from shardwright.agents.structure.patterns.delta_rule_kernels import OPERATORS, by_kernels, check, counted, layer_sizes
from shardwright.agents.structure.patterns.delta_rule_module import around
from shardwright.agents.structure.patterns.delta_rule_reading import Unread, read_layer
from shardwright.agents.structure.patterns.delta_rule_spelling import formula, spell
from shardwright.agents.structure.patterns.gated_rms_norm import GatedRmsNorm
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

FEW, MANY = 2, 8
"""Key heads of the differential test where the layer has more than ``MANY`` value heads: heads do not meet."""
SCALES = {"normal": 1.0, "strong-gates": 12.0, "loud-token": 1.0, "zero-rows": 1.0}


class DeltaRuleLayer(Pattern):
    """A whole linear-attention layer between its projections."""

    name = "delta_rule_layer"
    version = 1
    title = "Gated delta rule with convolution, gates and norm"
    reads_views = True

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        view = View(graph)
        rules = tuple(view.ops("delta_rule"))
        norms = GatedRmsNorm().find(captured, graph) if rules else ()
        found = [self._at(captured, graph, view, rule, norms) for rule in rules]
        return tuple(match for match in found if match is not None)

    def _at(
        self, captured: CapturedGraph, graph: CanonicalGraph, view: View, rule: OpNode, norms: tuple[Match, ...]
    ) -> Match | None:
        try:
            layer = read_layer(view, rule, norms)
        except Unread:
            return None
        module = around(view, captured, layer, rule.module_path)
        constants = {
            **layer.constants,
            **module.ranges,
            "operators": " ".join(OPERATORS[layer.constants["form"]]),
            "not_plain": module.because,
        }
        inputs = {role: node.id for role, node in layer.inputs.items()}
        return self.bind(captured, graph, inputs, {"y": layer.y.id}, constants, rule.module_path, module.roles)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return spell(values, constants)

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        return formula(values, constants)

    def gradients(self, match: Match) -> tuple[str, ...]:
        return tuple(match.region.inputs)

    def sizes(self, match: Match) -> Sizes:
        """A layer of few heads of the same widths: heads do not meet between the convolution and the norm."""
        c = match.constants
        H, HV, K, V = c["heads"], c["value_heads"], c["key_width"], c["value_width"]
        if HV <= MANY:
            return Sizes({})
        few, B, T = FEW * HV // H, *match.region.spec("beta").shape[:2]
        pairs = [(H, FEW), (HV, few), (H * K, FEW * K), (2 * H * K, 2 * FEW * K), (HV * V, few * V)]
        pairs += [(2 * H * K + HV * V, 2 * FEW * K + few * V), (B * T * HV, B * T * few)]
        small = dict(pairs)
        kept = {B, T, K, V, HV // H * V, *match.region.spec("norm_weight").shape}
        if kept & set(small) or any(small[size] != fewer for size, fewer in pairs):
            raise ValueError(f"{HV} heads of {K} cannot be told from its widths: no smaller layer of the same kind")
        return Sizes(small)

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Gates from none to saturated, rows of zeros, one loud token."""
        shapes = {role: sizes.shape(match.region.spec(role).shape) for role in match.region.inputs}
        return {name: layer_case(name, shapes) for name in SCALES}

    def second_opinion(self, match: Match) -> str:
        """The family's own recurrence across the edge of a chunk."""
        return rule_second_opinion(match.constants)

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, lora_inside=False, device_types=("cuda",))
        return (
            VariantSpec("kernel", "shardwright", OPERATORS["channels"][0], kernel, forms=("channels",)),
            VariantSpec("kernel-heads", "shardwright", OPERATORS["heads"][0], kernel, forms=("heads",)),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=PART_OF_MODULE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        """Workers run the module's projections one by one."""
        if spec.provider != "shardwright" or not match.constants["not_plain"]:
            return ""
        return f"{match.anchor} is more than projections: {match.constants['not_plain']}"

    def must_verify(self, match: Match, spec: VariantSpec) -> tuple[str, ...]:
        """The recurrence and the convolution; the norm needs no such time, here as little as alone."""
        if spec.provider != "shardwright":
            return ()
        return tuple(op for op in OPERATORS[match.constants["form"]] if op in ASSEMBLED)

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        return lambda values: by_kernels(values, match.constants)

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        def like(role: str) -> Tensor:
            spec = match.region.spec(role)
            wide = role in match.parameters and spec.dtype == "float32"
            return torch.empty(spec.shape, dtype=torch.float32 if wide else dtype, device="meta")

        check({role: like(role) for role in match.region.inputs}, match.constants, op)
        return True

    def kernel_parts(self, match: Match, spec: VariantSpec, tokens: int) -> tuple[tuple[str, dict[str, int]], ...]:
        return counted(match.constants, _taps(match), tokens)

    def unranked(self, match: Match, spec: VariantSpec) -> str:
        return "" if spec.computes(match.constants) else f"computes {' or '.join(spec.forms)}"

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        return layer_sizes(match.constants, _taps(match), tokens)


def _taps(match: Match) -> int:
    """Taps of the convolutions."""
    return next(match.region.spec(r).shape[-1] for r in match.region.inputs if r.endswith("conv_weight"))


def layer_case(name: str, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Inputs of a layer, by name of the case; gates are scaled by ``SCALES``."""
    generator = torch.Generator().manual_seed(43 + len(name))
    made = {role: torch.randn(s, generator=generator, dtype=torch.float64) for role, s in shapes.items()}
    for role in ("decay", "beta", "gate"):
        made[role] *= SCALES[name]
    streams = [role for role in ("q", "k", "v", "mixed") if role in made]
    if name == "loud-token":
        made[streams[-1]][:, 1] *= 1e3
    if name == "zero-rows":
        for role in streams:
            made[role][:, 2:8] = 0
    return made
