"""Residual add and RMSNorm: ``r = residual + branch``, ``y = rms_norm(r)``; both results are used.

Inside a layer the sum and the norm stand together. Between layers the sum ends one layer and the norm begins the next:
that one is found too, and refused, because the two halves lie in different FSDP units.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.pre_norm_layer import pre_norm_roles
from shardwright.agents.structure.patterns.rms_norm import Norm, norms, oracle_norm, reference_norm
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode

NOT_A_MODULE = "workers compile whole modules, and the sum lies outside the norm"


class AddRmsNorm(Pattern):
    """Residual add and RMSNorm as one operator with two results."""

    name = "add_rms_norm"
    version = 1
    title = "Residual add + RMSNorm"
    spans_modules = True
    contiguous = ("residual", "branch", "weight")
    strided = ("residual", "branch")
    trainable = ("residual", "branch", "weight")

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        found = []
        for norm in norms(graph):
            inside = self._inside(captured, graph, norm)
            across = self._across(captured, graph, norm)
            found += [match for match in (inside, across) if match is not None]
        return tuple(found)

    def _inside(self, captured: CapturedGraph, graph: CanonicalGraph, norm: Norm) -> Match | None:
        """The norm of a sum that the same layer makes."""
        view, total = View(graph), norm.x
        if not view.is_op(total, "add", 2) or total.module_path != captured.module_path:
            return None
        if not captured.module_path:
            return None
        residual, branch = self._sides(view, total, captured.module_path)
        weight = below(norm.weight.target, captured.module_path)
        module = below(norm.y.module_path, captured.module_path)
        if weight is None or module is None or weight != f"{module}.weight":
            return None
        inputs = {"residual": residual.id, "branch": branch.id, "weight": norm.weight.id}
        outputs = {"y": norm.y.id, "new_residual": total.id}
        layer = captured.module_path
        roles = {"norm": module, **pre_norm_roles(graph, layer, total, module)}
        return self.bind(captured, graph, inputs, outputs, norm.constants, layer, roles)

    def _across(self, captured: CapturedGraph, graph: CanonicalGraph, norm: Norm) -> Match | None:
        """The norm that begins a layer, where the layer before ends in a sum (as this one does)."""
        view, last = View(graph), graph.by_id[graph.outputs[0]]
        begins = norm.x.kind == "input" and not any(view.is_op(u, "layer") for u in graph.users(norm.x.id))
        if len(captured.occurrences) < 2 or not begins or not view.is_op(last, "add", 2):
            return None
        module = below(norm.y.module_path, captured.module_path)
        if module is None or last.module_path != captured.module_path or norm.x.output != last.output:
            return None
        weight = {"x": norm.x.id, "weight": norm.weight.id}
        roles = {"norm": module}
        match = self.bind(captured, graph, weight, {"y": norm.y.id}, norm.constants, captured.module_path, roles)
        seam = f"the sum ends one layer ({last.source}), the norm {module} begins the next"
        return None if match is None else replace(match, seam=seam)

    @staticmethod
    def _sides(view: View, total: OpNode, layer: str) -> tuple[OpNode, OpNode]:
        """(residual, branch): the branch is what a submodule made."""
        one, other = view.operand(total, 0), view.operand(total, 1)
        made = view.through(one, "reshape", "cast")
        is_branch = made.kind == "op" and made.module_path != layer and not view.is_op(made, "add")
        return (other, one) if is_branch else (one, other)

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        total = values["residual"] + values["branch"]
        return {"new_residual": total, "y": reference_norm(total, values["weight"], constants)}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        total = values["branch"] + values["residual"]
        return {"new_residual": total, "y": oracle_norm(total, values["weight"], constants)}

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, lora_inside=False, device_types=("cuda",))
        return (
            VariantSpec("kernel", "shardwright", "add_rms_norm", kernel, forms=("cast-then-scale",)),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=NOT_A_MODULE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        """The kernel needs a layer whose own forward is the two sums and nothing else."""
        if match.seam or spec.provider != "shardwright":
            return match.seam
        return (
            "" if "branch" in match.roles else "the layer is not exactly x + branch(norm x), then + mlp(norm of that)"
        )

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        return {"T": tokens, "H": match.region.spec("weight").shape[-1]}
