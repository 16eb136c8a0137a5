"""Head and loss."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.agents.structure.patterns.linear_cross_entropy import LinearCrossEntropy
from shardwright.agents.structure.testkit import PatternContract, meta


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(64, 300, bias=False)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().view(-1, 300), labels.view(-1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.lm_head(x), labels)


class ReshapedFirst(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.lm_head(x).reshape(-1, 300).to(torch.float32), labels.flatten(), ignore_index=-100)


class Summed(Head):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().view(-1, 300), labels.view(-1), reduction="sum")


class Smoothed(Head):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().view(-1, 300), labels.view(-1), label_smoothing=0.1)


class OtherIgnored(Head):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float().view(-1, 300), labels.view(-1), ignore_index=0)


class Capped(Head):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(30.0 * torch.tanh(logits / 30.0), labels)


class NarrowLoss(Head):
    """The loss in bf16."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.view(-1, 300), labels.view(-1))


class LogitsReturned(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor):  # type: ignore[no-untyped-def, override]
        logits = self.lm_head(x)
        return self.loss(logits, labels), logits


class LogitsChanged(Head):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(x)
        logits[..., 0] = 0.0
        return self.loss(logits, labels)


def example(kind: type[nn.Module]):  # type: ignore[no-untyped-def]
    return lambda: (kind(), (meta(2, 6, 64), meta(2, 6, dtype=torch.long)))


class TestLinearCrossEntropy(PatternContract):
    pattern = LinearCrossEntropy()
    positives = {"plain": (example(Head), 1), "reshaped-first": (example(ReshapedFirst), 1)}
    near_misses = {
        "summed": example(Summed),
        "smoothed": example(Smoothed),
        "other-ignored": example(OtherIgnored),
        "capped": example(Capped),
        "narrow-loss": example(NarrowLoss),
        "logits-returned": example(LogitsReturned),
        "logits-changed": example(LogitsChanged),
    }
