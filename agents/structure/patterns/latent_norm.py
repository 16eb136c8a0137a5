"""The norm of an MLA latent with the split before it: ``c, rest = split(joint); y = norm(c)``.

The joint projection's first columns are the latent, the rest a key part that all heads share.
Legend: W width of the joint projection, H width of the latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View, below
from shardwright.agents.structure.patterns.rms_norm import Norm, norms, oracle_norm, reference_norm, rows_per_token
from shardwright.schemas.fusion import VariantPredicate

INSIDE = "the split lies inside the attention's own forward, which workers do not take apart"


class LatentNorm(Pattern):
    """Split and norm as one operator, without a copy of the rest."""

    name = "latent_norm"
    version = 1
    title = "Latent norm"
    contiguous = ("joint", "weight")
    strided = ("joint",)
    trainable = ("joint", "weight")

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        found = [self._at(captured, graph, norm) for norm in norms(graph)]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, norm: Norm) -> Match | None:
        view = View(graph)
        if not view.is_op(norm.x, "slice", 1) or norm.x.output is None:
            return None
        joint, width = view.operand(norm.x), norm.x.output.shape[-1]
        whole = joint.output.shape[-1] if joint.output else 0
        if norm.x.arguments != {"dim": -1, "start": 0, "stop": width}:
            return None
        cut = {"dim": -1, "start": width, "stop": whole}
        rest = [n for n in graph.users(joint.id) if view.is_op(n, "slice", 1) and n.arguments == cut]
        anchor = norm.x.module_path
        name = below(norm.y.module_path, anchor)
        if len(rest) != 1 or name is None:
            return None
        inputs = {"joint": joint.id, "weight": norm.weight.id}
        outputs = {"latent": norm.y.id, "rest": rest[0].id}
        return self.bind(captured, graph, inputs, outputs, norm.constants, anchor, {"norm": name})

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        width = values["weight"].shape[0]
        latent, rest = values["joint"][..., :width], values["joint"][..., width:]
        return {"latent": reference_norm(latent, values["weight"], constants), "rest": rest}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        width = values["weight"].shape[0]
        kept, rest = torch.tensor_split(values["joint"], [width], dim=-1)
        return {"latent": oracle_norm(kept, values["weight"], constants), "rest": rest}

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, lora_inside=False, device_types=("cuda",))
        forms = ("cast-then-scale",)
        return (
            VariantSpec("kernel", "shardwright", "latent_norm", kernel, forms=forms, not_installable=INSIDE),
            VariantSpec("compile", "compile", "-", anywhere, not_installable=INSIDE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        if match.constants["form"] != "cast-then-scale":
            return None
        from shardwright.kernels.latent_norm.reference import latent_norm_reference

        def run(values: Tensors) -> Tensors:
            latent, rest = latent_norm_reference(values["joint"], values["weight"], match.constants["eps"])
            return {"latent": latent, "rest": rest}

        return run

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        from shardwright.kernels.latent_norm import contract

        shapes = (match.region.spec(role).shape for role in ("joint", "weight"))
        joint, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        contract.check_static(joint, weight, match.constants["eps"])
        return True

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        joint, latent = match.region.spec("joint").shape, match.region.spec("weight").shape
        return {"T": rows_per_token(match, "joint") * tokens, "W": joint[-1], "H": latent[0]}
