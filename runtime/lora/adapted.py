"""What a module of expert stacks knows of its adapters: a pair for each expert, or one that all share.

Legend: L local experts, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwright.runtime.lora.shared import SharedPairs


class AdaptedStacks(nn.Module):
    """Adapters of stacks by name: ``P_lora_a`` [L, r, in] and ``P_lora_b`` [L, out, r] for a stack ``P``.

    Attributes:
        scalings: stack → what its adapter's product is multiplied by.
        shared: stack → where the pair of all experts lies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scalings: dict[str, float] = {}
        self.shared: dict[str, SharedPairs] = {}

    def add_adapter(self, stack: str, a: nn.Parameter, b: nn.Parameter, scaling: float) -> None:
        """Attach an adapter to a stack: a [L, r, in], b [L, out, r]."""
        self.register_parameter(f"{stack}_lora_a", a)
        self.register_parameter(f"{stack}_lora_b", b)
        self.scalings[stack] = scaling

    def share_adapter(self, stack: str, pairs: SharedPairs, scaling: float) -> None:
        """All experts of a stack use the pair that ``pairs`` holds for it; its parameters stay there."""
        self.shared[stack] = pairs
        self.scalings[stack] = scaling

    def adapter(self, stack: str, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """A and B of a stack in the format of computation; ``None`` where it has none.

        [L, r, in] and [L, out, r]; [r, in] and [out, r] where all experts share them.
        """
        if stack not in self.scalings:
            return None
        if stack in self.shared:
            return self.shared[stack].pair(stack, dtype)
        return getattr(self, f"{stack}_lora_a").to(dtype), getattr(self, f"{stack}_lora_b").to(dtype)
