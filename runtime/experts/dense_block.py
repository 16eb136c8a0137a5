"""Blocks that give every expert every token, weighted before the experts: made to give each only its own.

Llama 4's block repeats all tokens for all experts and multiplies them by the router's scores, which are 0 where an
expert was not chosen. Without biases an expert of 0 is 0, so sending each expert its chosen tokens, weighted first, is
the same function: ``y_t = Σ_k down_e( act(gate_e s_tk x_t) · up_e s_tk x_t )``.
Legend: T tokens, K experts per token, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DENSE_CALLS = {"Llama4TextExperts": ("hidden_states",)}
"""Experts classes that take [E · T, H], and how they are called."""


def is_dense(experts: nn.Module) -> bool:
    """Whether this family's block gives every expert every token."""
    return type(experts).__name__ in DENSE_CALLS


def sparse_forward(block: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The forward of such a block over experts that take (hidden, index, weights) and weigh their inputs.

    The block keeps its ``router``, ``experts`` and ``shared_expert``, and what it returns: output and router logits.
    """
    family: Any = block

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        flat = hidden_states.reshape(-1, family.hidden_dim)
        scores, logits = family.router(flat)
        index = torch.topk(logits, family.top_k, dim=1).indices
        routed = family.experts(flat, index, scores.gather(1, index))
        return family.shared_expert(flat) + routed, logits

    return forward
