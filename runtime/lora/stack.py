"""An expert stack inside a linear of its own, called with rows grouped by expert and the size of each group.

Such a block sorts its rows itself (JetMoE), so its experts lie whole on every rank: ep is 1.
Legend: N rows, E experts, r rank.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.grouped import GroupedLoraLinear
from shardwright.runtime.lora.adapted import AdaptedStacks

CALL = ("inputs", "expert_size")
WEIGHT = "weight"


def takes_sizes(module: nn.Module | None) -> bool:
    """Whether a module is such a linear."""
    weight = None if module is None else module._parameters.get(WEIGHT)
    if module is None or weight is None or weight.dim() != 3:
        return False
    return tuple(inspect.signature(type(module).forward).parameters)[1:] == CALL


class LoraStack(AdaptedStacks):
    """Takes its place under the same name: ``weight`` [E, out, in], ``weight_lora_a`` and ``weight_lora_b``."""

    first, slots = 0, None

    def __init__(self, original: nn.Module, name: str, meter: LoadMeter) -> None:
        super().__init__()
        self.weight: nn.Parameter = original.weight  # type: ignore[assignment]
        self.num_experts = self.local = self.weight.shape[0]
        self.name, self.meter = name, meter

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """[N, in], rows of each expert → [N, out]."""
        sizes = [int(size) for size in expert_size]
        if self.meter.recording:
            self.meter.add(self.name, torch.tensor(sizes, device=inputs.device))
        a, b = self.adapter(WEIGHT, inputs.dtype) or (None, None)
        scaling = self.scalings.get(WEIGHT, 0.0)
        y: Tensor = GroupedLoraLinear.apply(inputs, self.weight, None, a, b, sizes, scaling, False)
        return y
