"""All guards of an expert layer: shapes, dtypes, layouts and places of its tensors, and what may learn.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.grouped_lora_mlp import contract
from shardwright.kernels.grouped_lora_mlp.layer import Choice, Weights
from shardwright.kernels.guards import refuse


def check(
    x: Tensor, counts: Tensor | None, w: Weights, choice: Choice, *, op: str = contract.NAME, real: bool = True
) -> None:
    """All guards; those on memory only for real tensors.

    Raises:
        KernelError: see ``contract``; ``trains-the-base`` where a tensor wants a gradient that it does not get.
    """
    contract.check_choice(op, choice.activation, choice.layout)
    contract.check_weights(op, x, w.gate_up, w.down, choice.activation.gated, choice.layout)
    E, H, (I, F) = w.gate_up.shape[0], x.shape[1], w.widths(choice)
    tensors = {"x": x, "gate_up": w.gate_up, "down": w.down}
    for role, a, b, sizes in (("up", w.up_a, w.up_b, (E, F, H)), ("down", w.down_a, w.down_b, (E, H, I))):
        if (a is None) != (b is None):
            raise refuse(op, "wrong-shape", f"{role} has one adapter factor", "pass both a and b")
        if a is not None and b is not None:
            contract.check_adapter(op, role, a, b, sizes, x)
            tensors |= {f"{role}.a": a, f"{role}.b": b}
    for role, bias, width in (("up_bias", w.up_bias, F), ("down_bias", w.down_bias, H)):
        if bias is not None:
            contract.check_bias(op, role, bias, (E, width), x)
            tensors[role] = bias
    if counts is not None:
        contract.check_counts(op, counts, E)
    refuse_learning(op, w, choice)
    if real:
        contract.check_places(op, cast(Any, tensors), interpreted=device.interpreted())


def learns_base(w: Weights) -> bool:
    """Whether a stack wants a gradient, or a bias does."""
    frozen = (w.gate_up, w.down, w.up_bias, w.down_bias)
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in frozen)


def refuse_learning(op: str, w: Weights, choice: Choice) -> None:
    """Biases are frozen, and so are the stacks unless the choice trains them.

    Raises:
        KernelError: ``trains-the-base``. Looks at the grad mode, so it runs before an autograd function.
    """
    if not learns_base(w):
        return
    if any(bias is not None and bias.requires_grad for bias in (w.up_bias, w.down_bias)):
        raise refuse(op, "trains-the-base", "a bias wants a gradient", "freeze the biases, or keep this module eager")
    if not choice.trains_base:
        what = "gate_up or down wants a gradient"
        raise refuse(op, "trains-the-base", what, "freeze the base, pass trains_base, or keep this module eager")
