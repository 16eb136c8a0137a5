"""Next-token cross-entropy, summed; the caller divides by the tokens of the whole batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """[B, S] → [B, S, V]."""
    output: Any = model(input_ids=ids, use_cache=False)
    return output.logits


def summed_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Sum of −log p(next token) over the B · (S − 1) predicted tokens, fp32."""
    logits = logits_of(model, ids)[:, :-1]
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return F.cross_entropy(flat, ids[:, 1:].reshape(-1), reduction="sum")


def predicted_tokens(sequences: int, sequence_tokens: int) -> int:
    """Tokens that a loss over whole sequences counts."""
    return sequences * (sequence_tokens - 1)
