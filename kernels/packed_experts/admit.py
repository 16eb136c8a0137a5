"""All guards of a packed expert layer: shapes, dtypes and places of its tensors, and that nothing frozen may learn.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shardwright.kernels import device, guards
from shardwright.kernels.grouped_lora_mlp import contract as grouped_contract
from shardwright.kernels.grouped_lora_mlp.layer import Choice
from shardwright.kernels.packed_experts import contract
from shardwright.kernels.packed_experts.compute import PackedWeights


def check(x: Tensor, counts: Tensor, w: PackedWeights, choice: Choice, *, real: bool = True) -> None:
    """All guards; those on memory only for real tensors.

    Raises:
        KernelError: see ``contract`` and ``grouped_lora_mlp.contract``.
    """
    op = contract.NAME
    grouped_contract.check_choice(op, choice.activation, choice.layout)
    contract.check_inputs(op, x, cast(Any, w.gate_up), cast(Any, w.down), choice.activation, choice.layout.interleaved)
    (E, F, H), I = w.gate_up.shape, w.down.shape[2]
    tensors = {"x": x, "counts": counts}
    tensors |= {"gate_up values": w.gate_up.values, "gate_up scales": w.gate_up.scales}
    tensors |= {"down values": w.down.values, "down scales": w.down.scales}
    for role, a, b, sizes in (("up", w.up_a, w.up_b, (E, F, H)), ("down", w.down_a, w.down_b, (E, H, I))):
        if (a is None) != (b is None):
            raise guards.refuse(op, "wrong-shape", f"{role} has one adapter factor", "pass both a and b")
        if a is not None and b is not None:
            grouped_contract.check_adapter(op, role, a, b, sizes, x)
            tensors |= {f"{role}.a": a, f"{role}.b": b}
    for role, bias, width in (("up_bias", w.up_bias, F), ("down_bias", w.down_bias, H)):
        if bias is not None:
            grouped_contract.check_bias(op, role, bias, (E, width), x)
            tensors[role] = bias
    grouped_contract.check_counts(op, counts, E)
    if real:
        guards.one_device(op, cast(Any, tensors), interpreted=device.interpreted())
        guards.dense(op, cast(Any, tensors))


def refuse_learning(w: PackedWeights) -> None:
    """The packed base and the biases have no gradient: none of them may want one.

    Raises:
        KernelError: ``trains-the-base``. Looks at the grad mode, so it runs before an autograd function.
    """
    if not torch.is_grad_enabled():
        return
    frozen = {"the base": w.stacks(), "a bias": (w.up_bias, w.down_bias)}
    for what, tensors in frozen.items():
        if any(tensor is not None and tensor.requires_grad for tensor in tensors):
            action = f"freeze {what}, or keep this module eager"
            raise guards.refuse(contract.NAME, "trains-the-base", f"{what} wants a gradient", action)
