"""The experts of one MoE layer on one EP rank: local stacks, adapters, dispatch and combine.

Takes the place of transformers' experts module, under the same name and with the same parameter names.
Legend: T tokens, K experts per token, E experts, L = E / ep local experts, H hidden, I expert width, r rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.checkpoints.layouts import ExpertLayout
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.dense_block import is_dense
from shardwright.runtime.experts.dispatch import combine, dispatch, plan_route
from shardwright.runtime.experts.grouped import GroupedLoraLinear
from shardwright.schemas.errors import LegalityError

CALLS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
"""What a supported experts module takes, in this order."""


class LoraExperts(nn.Module):
    """Local experts with adapters.

    Parameters keep the original names: ``gate_up_proj`` [L, 2I, H] and ``down_proj`` [L, H, I] (or the family's own
    order), biases where the family has them; an adapted stack ``P`` adds ``P_lora_a`` [L, r, in] and ``P_lora_b``
    [L, out, r].

    Attributes:
        num_experts: E over all ranks.
        first: global number of the first local expert.
        weigh_inputs: routing weights multiply what an expert gets, not what it gives.
    """

    def __init__(
        self,
        original: nn.Module,
        name: str,
        layout: ExpertLayout,
        ep: int,
        ep_rank: int,
        group: dist.ProcessGroup | None,
        meter: LoadMeter,
    ) -> None:
        super().__init__()
        check_call(original, name)
        stacks = dict(original.named_parameters(recurse=False))
        self.num_experts = stacks[layout.down].shape[0]
        local = self.num_experts // ep
        if local * ep != self.num_experts:
            raise LegalityError(
                "experts-not-divisible",
                f"{self.num_experts} experts over ep {ep}",
                where=name,
                next_action="choose an ep that divides the number of experts",
            )
        self.first = ep_rank * local
        for stack, value in stacks.items():
            shape = (local, *value.shape[1:])
            parameter = nn.Parameter(torch.empty(shape, dtype=value.dtype, device=value.device), requires_grad=False)
            self.register_parameter(stack, parameter)
        self.name, self.layout, self.ep, self.group, self.meter = name, layout, ep, group, meter
        self.scalings: dict[str, float] = {}
        self.weigh_inputs = is_dense(original)
        self._gate = _gate_of(original, layout)

    def add_adapter(self, stack: str, a: nn.Parameter, b: nn.Parameter, scaling: float) -> None:
        """Attach an adapter to a stack: a [L, r, in], b [L, out, r]."""
        self.register_parameter(f"{stack}_lora_a", a)
        self.register_parameter(f"{stack}_lora_b", b)
        self.scalings[stack] = scaling

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H], [T, K], [T, K] → [T, H]."""
        route = plan_route(top_k_index, self.num_experts, self.ep, self.group)
        self.meter.add(self.name, route.counts)
        if self.weigh_inputs:
            rows = dispatch(hidden_states, route, top_k_index.shape[-1], self.group, top_k_weights)
            top_k_weights = torch.ones_like(top_k_weights)
        else:
            rows = dispatch(hidden_states, route, top_k_index.shape[-1], self.group)
        up = self._product(rows, self.layout.up, route.sizes)
        down = self._product(self.activate(up), self.layout.down, route.sizes)
        return combine(down, route, top_k_weights, self.group)

    def activate(self, up: Tensor) -> Tensor:
        """The family's own activation of the first product: [N, F] → [N, I]."""
        return self._gate(up)

    def adapter(self, stack: str, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """A [L, r, in] and B [L, out, r] of a stack in the format of computation; ``None`` where it has none."""
        if stack not in self.scalings:
            return None
        return getattr(self, f"{stack}_lora_a").to(dtype), getattr(self, f"{stack}_lora_b").to(dtype)

    def _product(self, rows: Tensor, stack: str, sizes: list[int]) -> Tensor:
        a, b = self.adapter(stack, rows.dtype) or (None, None)
        bias = getattr(self, f"{stack}_bias") if self.layout.biased else None
        in_out = self.layout.order == "in_out"
        scaling = self.scalings.get(stack, 0.0)
        y: Tensor = GroupedLoraLinear.apply(rows, getattr(self, stack), bias, a, b, sizes, scaling, in_out)
        return y

    def extra_repr(self) -> str:
        last = self.first + getattr(self, self.layout.down).shape[0]
        return f"experts {self.first}..{last - 1} of {self.num_experts}, adapters on {sorted(self.scalings)}"


def _gate_of(original: nn.Module, layout: ExpertLayout) -> Callable[[Tensor], Tensor]:
    """The family's own activation: its ``_apply_gate``, its gated ``act_fn``, or its plain ``act_fn``."""
    family: Any = original
    if layout.gated and hasattr(family, "_apply_gate"):
        return family._apply_gate
    activation: Callable[[Tensor], Tensor] = family.act_fn
    if not layout.gated:
        return activation

    def gated(up: Tensor) -> Tensor:
        gate, value = up.chunk(2, dim=-1)
        return activation(gate) * value

    return gated


def check_call(module: nn.Module, name: str) -> None:
    """Refuse an experts module whose forward is not ``(hidden_states, top_k_index, top_k_weights)`` or a known block's.

    Raises:
        LegalityError: ``experts-call``.
    """
    wrapped = inspect.unwrap(type(module).forward)
    names = tuple(inspect.signature(wrapped).parameters)[1:4]
    if names not in CALLS and not is_dense(module):
        raise LegalityError(
            "experts-call",
            f"{type(module).__name__}.forward takes {names}, expected {CALLS[0]}",
            where=name,
            next_action="target attention only and keep ep = 1, or add this family to runtime/experts/module.py",
        )
