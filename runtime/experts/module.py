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
from shardwright.runtime.experts.balance import LoadMeter, rows_of_experts
from shardwright.runtime.experts.dense_block import is_dense
from shardwright.runtime.experts.dispatch import Route, combine, dispatch, padded
from shardwright.runtime.experts.dispatch import plan_route as plan_route
from shardwright.runtime.experts.grouped import GroupedLoraLinear
from shardwright.runtime.experts.hierarchical import Nodes, in_two_stages
from shardwright.runtime.experts.overlap import Compute, in_chunks
from shardwright.runtime.experts.packed import PackedLoraLinear, Packing, register_stack, stack_of
from shardwright.runtime.experts.placement import Places, Slots, check_slots
from shardwright.runtime.experts.rows import TORCH, Rows
from shardwright.runtime.lora.adapted import AdaptedStacks
from shardwright.schemas.errors import LegalityError

CALLS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)
"""What a supported experts module takes, in this order."""


class LoraExperts(AdaptedStacks):
    """Local experts with adapters.

    Parameters keep the original names: ``gate_up_proj`` [L, 2I, H] and ``down_proj`` [L, H, I] (or the family's own
    order), biases where the family has them; an adapted stack ``P`` adds ``P_lora_a`` [L, r, in] and ``P_lora_b``
    [L, out, r]. A pair that all experts share stands beside the module (``lora/shared.py``).

    Attributes:
        num_experts: E over all ranks.
        first: place of the first local expert, which is its number where ``slots`` is ``None``.
        local: experts on this rank, copies included.
        chunks: pieces of a micro-batch's rows, of which one travels while another is computed.
        nodes: how the EP group lies over nodes, where rows travel in two stages.
        slots: the expert in each place over all ranks; ``None`` where experts stand in their own order.
        meanwhile: work that needs no routed row, done while rows travel (``experts/shared.py``).
        packing: how the stacks stay packed; ``None`` where they are plain parameters.
        weigh_inputs: routing weights multiply what an expert gets, not what it gives.
        padding: multiple of rows that each local expert gets, zeros added behind those that were routed to it.
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
        packing: Packing | None = None,
        chunks: int = 1,
        nodes: Nodes | None = None,
        slots: Slots | None = None,
        padding: int = 1,
    ) -> None:
        super().__init__()
        check_call(original, name)
        stacks = dict(original.named_parameters(recurse=False))
        self.num_experts = stacks[layout.down].shape[0]
        if slots is not None:
            check_slots(slots, self.num_experts, ep, name)
        self.slots = slots
        self.places = None if slots is None else Places(slots, self.num_experts)
        self.num_places = self.num_experts if slots is None else len(slots)
        local = self.num_places // ep
        if local * ep != self.num_places:
            raise LegalityError(
                "experts-not-divisible",
                f"{self.num_experts} experts over ep {ep}",
                where=name,
                next_action="choose an ep that divides the number of experts",
            )
        self.first, self.local, self.packing = ep_rank * local, local, packing
        for stack, value in stacks.items():
            shape = (local, *value.shape[1:])
            if packing is not None and stack in (layout.up, layout.down):
                out, into = shape[1:] if layout.order == "out_in" else shape[:0:-1]
                register_stack(self, stack, (local, out, into), packing)
                continue
            parameter = nn.Parameter(torch.empty(shape, dtype=value.dtype, device=value.device), requires_grad=False)
            self.register_parameter(stack, parameter)
        self.name, self.layout, self.ep, self.group, self.meter = name, layout, ep, group, meter
        self.chunks, self.nodes, self.padding = chunks, nodes, padding
        self.weigh_inputs = is_dense(original)
        self.meanwhile: Callable[[], None] | None = None
        self._gate = _gate_of(original, layout)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H], [T, K], [T, K] → [T, H]."""
        return self.exchanged(hidden_states, top_k_index, top_k_weights, self.products)

    def products(self, rows: Tensor, route: Route) -> Tensor:
        """[P, H] rows of the local experts, grouped → [P, H]: both products and the activation."""
        up = self._product(rows, self.layout.up, route.sizes)
        return self._product(self.activate(up), self.layout.down, route.sizes)

    def exchanged(
        self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, compute: Compute, by: Rows = TORCH
    ) -> Tensor:
        """Tokens to their experts' ranks, ``compute`` there, and back: whole, or in the plan's chunks.

        Args:
            by: what sorts and moves rows; torch does where rows travel in two stages.
        """
        if self.nodes is not None or self.places is not None:
            self.meter.add(self.name, rows_of_experts(top_k_index, self.num_experts))
        if self.places is not None:
            top_k_index = self.places.of(top_k_index)
        if self.nodes is not None:
            return in_two_stages(
                hidden,
                top_k_index,
                top_k_weights,
                compute,
                self.nodes,
                self.num_places,
                chunks=self.chunks,
                weigh_inputs=self.weigh_inputs,
                padding=self.padding,
                meanwhile=self.meanwhile,
            )
        if self.group is not None and (self.chunks > 1 or self.meanwhile is not None):
            out, counts = in_chunks(
                hidden,
                top_k_index,
                top_k_weights,
                compute,
                chunks=self.chunks,
                num_experts=self.num_places,
                ep=self.ep,
                group=self.group,
                weigh_inputs=self.weigh_inputs,
                padding=self.padding,
                meanwhile=self.meanwhile,
                by=by,
            )
            if self.places is None:
                self.meter.add(self.name, counts)
            return out
        route = padded(plan_route(top_k_index, self.num_places, self.ep, self.group, by), self.padding)
        if self.places is None:
            self.meter.add(self.name, route.counts)
        before, after = (top_k_weights, torch.ones_like(top_k_weights)) if self.weigh_inputs else (None, top_k_weights)
        # In one expression: no name keeps rows that the next call is done with.
        return combine(compute(dispatch(hidden, route, self.group, before, by), route), route, after, self.group, by)

    def activate(self, up: Tensor) -> Tensor:
        """The family's own activation of the first product: [N, F] → [N, I]."""
        return self._gate(up)

    def _product(self, rows: Tensor, stack: str, sizes: list[int]) -> Tensor:
        a, b = self.adapter(stack, rows.dtype) or (None, None)
        bias = getattr(self, f"{stack}_bias") if self.layout.biased else None
        in_out = self.layout.order == "in_out"
        scaling = self.scalings.get(stack, 0.0)
        if self.packing is not None:
            packed: Tensor = PackedLoraLinear.apply(rows, stack_of(self, stack), bias, a, b, sizes, scaling)
            return packed
        y: Tensor = GroupedLoraLinear.apply(rows, getattr(self, stack), bias, a, b, sizes, scaling, in_out)
        return y

    def extra_repr(self) -> str:
        held = f", packed as {self.packing}" if self.packing else ""
        last = self.first + self.local - 1
        what = "experts" if self.slots is None else "places"
        return f"{what} {self.first}..{last} of {self.num_places}{held}, adapters on {sorted(self.scalings)}"


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
        LegalityError: ``experts-call``, ``experts-unequal`` where its stacks hold different numbers of experts.
    """
    sizes = {name: value.shape[0] for name, value in module.named_parameters(recurse=False) if value.dim() == 3}
    if len(set(sizes.values())) > 1:
        raise LegalityError(
            "experts-unequal",
            f"the stacks of {type(module).__name__} hold different numbers of experts: {sizes}",
            where=name,
            next_action="target attention only and keep ep = 1",
        )
    wrapped = inspect.unwrap(type(module).forward)
    names = tuple(inspect.signature(wrapped).parameters)[1:4]
    if names not in CALLS and not is_dense(module):
        raise LegalityError(
            "experts-call",
            f"{type(module).__name__}.forward takes {names}, expected {CALLS[0]}",
            where=name,
            next_action="target attention only and keep ep = 1, or add this family to runtime/experts/module.py",
        )
