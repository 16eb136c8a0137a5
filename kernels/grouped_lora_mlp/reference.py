"""The grouped LoRA MLP in plain torch: the meaning that the fused operator must have.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout

Adapter = tuple[Tensor, Tensor, float]
"""``a [E, r, in]``, ``b [E, out, r]``, scaling."""


def activate_reference(gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
    """The activation in the inputs' dtype; ``up`` is ``None`` for kinds without a gate."""
    first, second, third = activation.parameters
    if activation.kind == "relu2":
        return nnf.relu(gate).square()
    if activation.kind == "silu":
        return nnf.silu(gate)
    assert up is not None
    if activation.kind == "swiglu":
        return nnf.silu(gate) * up
    if activation.kind == "situ":
        return first * torch.tanh(gate / first) * torch.sigmoid(gate) * (second * torch.tanh(up / second))
    low = gate.clamp(max=first)
    return low * torch.sigmoid(second * low) * (up.clamp(-first, first) + third)


def expert_mlp_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_adapter: tuple[Tensor, Tensor, float] | None,
    down_adapter: tuple[Tensor, Tensor, float] | None,
    activation: Activation,
    layout: Layout,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """One expert: ``x [R, H]``, ``gate_up`` and ``down`` as stored, adapters ``a [r, in]``, ``b [out, r]``, biases
    ``[F]`` in the columns' order and ``[H]``."""
    flip = layout.order == "in_out"
    first = x @ (gate_up if flip else gate_up.mT)
    if up_adapter is not None:
        a, b, scaling = up_adapter
        first = first + (x @ a.mT) @ b.mT * scaling
    if up_bias is not None:
        first = first + up_bias
    up: Tensor | None = None
    gate = first
    if activation.gated:
        gate, up = (first[:, 0::2], first[:, 1::2]) if layout.interleaved else first.chunk(2, -1)
    h = activate_reference(gate, up, activation)
    y = h @ (down if flip else down.mT)
    if down_adapter is not None:
        a, b, scaling = down_adapter
        y = y + (h @ a.mT) @ b.mT * scaling
    return y if down_bias is None else y + down_bias


def grouped_lora_mlp_reference(
    x: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    up_adapter: Adapter | None,
    down_adapter: Adapter | None,
    activation: Activation,
    layout: Layout,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """``[R, H]`` → ``[R, H]``: each expert's rows through its MLP; rows past ``sum(counts)`` give zero."""
    sizes = [int(n) for n in counts.tolist()]
    parts, at = [], 0
    for e, size in enumerate(sizes):
        one = [None if ad is None else (ad[0][e], ad[1][e], ad[2]) for ad in (up_adapter, down_adapter)]
        rows = x[at : at + size]
        biases = [None if bias is None else bias[e] for bias in (up_bias, down_bias)]
        parts.append(expert_mlp_reference(rows, gate_up[e], down[e], one[0], one[1], activation, layout, *biases))
        at += size
    return torch.cat([*parts, 0 * x[at:]])
