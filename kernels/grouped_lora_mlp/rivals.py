"""What a user has without this operator, on the same sorted rows: torch's grouped matrix product.

Legend: R rows, E experts, H hidden, I expert width, r rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from shardwright.kernels.grouped_lora_mlp.reference import Adapter


def grouped_mm(rows: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """``rows [R, in]`` times each expert's ``stack [E, out, in]``; ``ends [E]`` int32 cumulative counts."""
    found = getattr(nnf, "grouped_mm", None) or torch._grouped_mm
    y: Tensor = found(rows, stack.transpose(1, 2), offs=ends)
    return y


def split_mlp(
    x: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor, up: Adapter | None, low: Adapter | None
) -> Tensor:
    """SwiGLU experts; an adapter adds two more grouped products, never a weight-sized difference."""
    gate, value = _split(x, ends, gate_up, up).chunk(2, -1)
    return _split(nnf.silu(gate) * value, ends, down, low)


def _split(x: Tensor, ends: Tensor, stack: Tensor, adapter: Adapter | None) -> Tensor:
    y = grouped_mm(x, stack, ends)
    if adapter is not None:
        a, b, scaling = adapter
        y = y + grouped_mm(grouped_mm(x, a, ends), b, ends) * scaling
    return y


def merged_mlp(
    x: Tensor, ends: Tensor, gate_up: Tensor, down: Tensor, up: Adapter | None, low: Adapter | None
) -> Tensor:
    """PEFT's way for expert parameters: each step forms ``W + scaling · B A`` for every expert."""
    gate, value = grouped_mm(x, _merged(gate_up, up), ends).chunk(2, -1)
    return grouped_mm(nnf.silu(gate) * value, _merged(down, low), ends)


def _merged(stack: Tensor, adapter: Adapter | None) -> Tensor:
    if adapter is None:
        return stack
    a, b, scaling = adapter
    return stack + torch.bmm(b, a) * scaling
