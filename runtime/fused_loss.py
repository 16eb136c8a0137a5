"""Head and loss as one operator: the logits [T, V] are never whole in memory.

The head's forward gets the labels through :meth:`LossHead.with_labels` and gives the loss in place of the logits. The
loss is made inside the head's own forward, so that FSDP's gathered weight is there; without labels the head gives
logits as ever.
Legend: B sequences, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.batch import IGNORE
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision


class LossHead:
    """The forward of a head that can give a loss."""

    def __init__(self, head: nn.Module, op: Callable[..., Tensor], logits: Callable[..., Tensor], name: str) -> None:
        self.head, self.op, self.logits, self.name = head, op, logits, name
        self.labels: Tensor | None = None
        self.loss: Tensor | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[B, S, H] → summed loss where labels are given, else logits."""
        if self.labels is None:
            return self.logits(hidden)
        head: Any = self.head
        factors = (head.lora_a, head.lora_b) if isinstance(head, LoraLinear) else (None, None)
        scale = head.scaling if isinstance(head, LoraLinear) else 1.0
        self.loss = self.op(
            hidden.contiguous(),
            head.weight,
            self.labels,
            *factors,
            lora_scale=scale,
            ignore_index=IGNORE,
            reduction="sum",
        )
        return self.loss

    @contextmanager
    def with_labels(self, labels: Tensor) -> Iterator[None]:
        """Inside the block the head gives the loss of these labels [B, S]."""
        self.labels, self.loss = labels.contiguous(), None
        try:
            yield
        finally:
            self.labels = None

    def take(self, output: Tensor) -> Tensor:
        """The loss, if it came out of the model as it went in.

        Raises:
            LegalityError: ``fusion-loss`` where the family works on its logits after the head.
        """
        loss, self.loss = self.loss, None
        if loss is None or output is not loss:
            raise LegalityError(
                "fusion-loss",
                "the model changes its logits after the head, so the fused loss would be another function",
                where=self.name,
                next_action="reject the linear_cross_entropy proposal for this family",
            )
        return loss


def loss_head(module: nn.Module, name: str, decision: FusionDecision) -> LossHead:
    """The fused head.

    Raises:
        LegalityError: ``fusion-loss`` for a head that is no plain linear map of a frozen weight.
    """
    linear: Any = module
    plain = isinstance(module, (nn.Linear, LoraLinear)) and linear.bias is None
    frozen = plain and not linear.weight.requires_grad
    dropped = isinstance(module, LoraLinear) and module.dropout > 0
    if not frozen or dropped or decision.roles.get("weight", "weight") != "weight":
        raise LegalityError(
            "fusion-loss",
            f"{type(module).__name__} is not a frozen linear map without bias and without adapter dropout",
            where=name,
            next_action="reject the linear_cross_entropy proposal for this family",
        )
    return LossHead(module, OPERATORS["linear_cross_entropy"].load_op(), module.forward, name)
