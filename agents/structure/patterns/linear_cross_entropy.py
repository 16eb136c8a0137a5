"""Head and loss: ``cross_entropy(hidden @ Wᵀ, labels)``, the mean over labels that are not ignored.

Legend: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.differential import float_cases
from shardwright.agents.structure.interpret import Sizes
from shardwright.agents.structure.patterns.base import Match, Pattern, Tensors, VariantSpec, View
from shardwright.schemas.fusion import VariantPredicate
from shardwright.schemas.graph import OpNode
from shardwright.schemas.recipe import LoraSpec

IGNORE = -100
NOT_A_MODULE = "workers compile whole modules, and the loss lies outside the head"


class LinearCrossEntropy(Pattern):
    """Logits and loss without keeping ``[T, V]``."""

    name = "linear_cross_entropy"
    version = 1
    title = "Linear + cross-entropy"
    contiguous = ("hidden", "weight")
    strided = ("hidden",)
    trainable = ("hidden", "weight")

    def find(self, captured: CapturedGraph, graph: CanonicalGraph) -> tuple[Match, ...]:
        found = [self._at(captured, graph, loss) for loss in View(graph).ops("cross_entropy_loss")]
        return tuple(match for match in found if match is not None)

    def _at(self, captured: CapturedGraph, graph: CanonicalGraph, loss: OpNode) -> Match | None:
        view = View(graph)
        constants = {k: v for k, v in loss.arguments.items() if k != "operands"}
        if loss.arguments.get("operands") != ["self", "target"] or constants:
            return None
        flat = view.operand(loss)
        logits = view.through(flat, "reshape", "cast")
        if not view.is_op(logits, "linear", 2):
            return None
        hidden, weight, labels = view.operand(logits), view.operand(logits, 1), view.operand(loss, 1)
        if weight.kind != "parameter" or hidden.output is None or weight.output is None:
            return None
        anchor, _, name = weight.target.rpartition(".")
        inputs = {"hidden": hidden.id, "weight": weight.id, "labels": labels.id}
        found = {"form": "mean", "ignore_index": IGNORE, "widened_first": view.is_op(flat, "reshape")}
        return self.bind(captured, graph, inputs, {"loss": loss.id}, found, anchor, {"weight": name})

    def reference(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        logits, vocabulary = F.linear(values["hidden"], values["weight"]), values["weight"].shape[0]
        if constants["widened_first"]:
            flat = logits.to(torch.float32).view(-1, vocabulary)
        else:
            flat = logits.view(-1, vocabulary).to(torch.float32)
        return {"loss": F.cross_entropy(flat, values["labels"], ignore_index=constants["ignore_index"])}

    def oracle(self, values: Tensors, constants: dict[str, Any]) -> Tensors:
        """Log-sum-exp less the label's logit, averaged over kept rows."""
        hidden, labels = values["hidden"].reshape(-1, values["hidden"].shape[-1]), values["labels"]
        logits = torch.einsum("th,vh->tv", hidden, values["weight"])
        keep = labels != constants["ignore_index"]
        picked = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return {"loss": ((torch.logsumexp(logits, -1) - picked) * keep).sum() / keep.sum()}

    def cases(self, match: Match, sizes: Sizes) -> dict[str, Tensors]:
        """Labels at the ends of the vocabulary, some ignored, all but one ignored."""
        shapes = {role: sizes.shape(match.region.spec(role).shape) for role in ("hidden", "weight")}
        cases = float_cases(shapes, seed=17, strided=self.strided)
        vocabulary, (tokens,) = shapes["weight"][0], match.region.spec("labels").shape
        generator = torch.Generator().manual_seed(19)
        for case in cases.values():
            labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
            labels[0], labels[1], labels[2::5] = 0, vocabulary - 1, IGNORE
            case["labels"] = labels
        single = dict(cases["normal"])
        single["labels"] = torch.full((tokens,), IGNORE)
        single["labels"][-1] = 3
        return {**cases, "one-label": single}

    def variants(self) -> tuple[VariantSpec, ...]:
        anywhere = VariantPredicate(tp_max=1, device_types=("cuda", "cpu"))
        plain = VariantPredicate(tp_max=1, lora_inside=False, device_types=("cuda", "cpu"))
        kernel = VariantPredicate(tp_max=1, device_types=("cuda",))
        return (
            VariantSpec("kernel", "shardwright", "linear_cross_entropy", kernel),
            VariantSpec("compile", "compile", "-", plain, not_installable=NOT_A_MODULE),
            VariantSpec("eager", "eager", "-", anywhere),
        )

    def refuses(self, match: Match, spec: VariantSpec) -> str:
        """Workers put the operator in place of the forward of a plain linear head."""
        if spec.provider != "shardwright":
            return ""
        if match.roles["weight"] != "weight":
            return f"the head's matrix is {match.roles['weight']} of {match.anchor or 'the model'}, not its weight"
        head = match.captured.module.get_submodule(match.anchor)
        return "" if type(head) is nn.Linear else f"{match.anchor} is a {type(head).__name__}, no plain linear map"

    def refuses_adapter(self, spec: VariantSpec, lora: LoraSpec) -> str:
        if spec.provider == "shardwright":
            return "the operator adds the head's adapter without dropout" if float(lora.dropout) else ""
        return super().refuses_adapter(spec, lora)

    def kernel_reference(self, match: Match) -> Callable[[Tensors], Tensors] | None:
        from shardwright.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

        def run(values: Tensors) -> Tensors:
            rows = values["hidden"].reshape(-1, values["hidden"].shape[-1])
            return {"loss": linear_cross_entropy_reference(rows, values["weight"], values["labels"])}

        return run

    def check_kernel(self, match: Match, op: str, dtype: torch.dtype) -> bool:
        from shardwright.kernels.linear_cross_entropy import contract

        shape = match.region.spec("hidden").shape
        x = torch.empty(shape, dtype=dtype, device="meta").flatten(0, -2)
        weight = torch.empty(match.region.spec("weight").shape, dtype=dtype, device="meta")
        labels = torch.empty(x.shape[0], dtype=torch.int64, device="meta")
        contract.check_static(x, weight, labels, None, None, lora_scale=1.0, reduction="sum")
        return True

    def cost_shape(self, match: Match, tokens: int) -> dict[str, int]:
        vocabulary, hidden = match.region.spec("weight").shape
        return {"T": tokens, "H": hidden, "V": vocabulary}
