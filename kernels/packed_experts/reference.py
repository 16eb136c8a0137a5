"""The packed experts in plain torch: the meaning that the fused operator must have.

A packed weight is the bf16 tensor that it decodes to (MXFP4: exactly; fp8: value · scale rounded to bf16 once).

Legend: R rows, E experts, H hidden, I expert width, N out and K in of a stack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels.grouped_lora_mlp.contract import Activation, Layout
from shardwright.kernels.grouped_lora_mlp.reference import Adapter, grouped_lora_mlp_reference
from shardwright.kernels.packed_experts.contract import WHOLE
from shardwright.kernels.packed_experts.storage import PackedStack, mxfp4_bytes

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise_reference(stack: PackedStack) -> Tensor:
    """The bf16 weight [E, N, K] of a stack."""
    if stack.kind == "fp8":
        block = WHOLE["fp8"]
        scale = stack.scales.repeat_interleave(block, 1).repeat_interleave(block, 2)
        return (stack.values.float() * scale).to(torch.bfloat16)
    packed, scale = mxfp4_bytes(stack)
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=packed.device)
    values = table[torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2).int()]
    power = torch.where(
        scale == 255, torch.nan, torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)
    )
    return (values.unflatten(-1, (-1, 32)) * power.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def packed_experts_reference(
    x: Tensor,
    counts: Tensor,
    gate_up: PackedStack,
    down: PackedStack,
    up_adapter: Adapter | None,
    down_adapter: Adapter | None,
    activation: Activation,
    interleaved: bool = False,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """``[R, H]`` → ``[R, H]`` in x's dtype: each expert's rows through its decoded MLP.

    Biases are ``[E, F]`` in the stack's own row order and ``[E, H]``.
    """
    up, low = (dequantise_reference(stack).to(x.dtype) for stack in (gate_up, down))
    layout = Layout("out_in", interleaved)
    adapters, biases = (up_adapter, down_adapter), (up_bias, down_bias)
    return grouped_lora_mlp_reference(x, counts, up, low, *adapters, activation, layout, *biases)
