"""The experts of a layer as one fused operator, under the plan's switch.

``moe_layer`` takes the whole layer where all experts lie on one rank: rows are gathered, multiplied, weighted and
summed without a sorted copy. ``grouped_lora_mlp`` takes the received rows between dispatch and combine at any ep.
Parameters, their names and their memory stay what they are: adapters are A [L, r, in] and B [L, out, r], as the
operators want them. A pair that all experts share is copied for each while the layer runs; autograd sums the copies'
gradients.

Legend: T tokens, K experts per token, E experts, L = E / ep local experts, H hidden, I expert width, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwright.kernels.grouped_lora_mlp.contract import GATED, Activation, Layout
from shardwright.kernels.registry import OPERATORS
from shardwright.runtime.experts.balance import rows_of_experts
from shardwright.runtime.experts.dispatch import Route
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.experts.overlap import Compute
from shardwright.runtime.experts.packed import stack_of
from shardwright.runtime.experts.rows_fused import KernelRows
from shardwright.runtime.lora.shared import for_each_expert
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.fusion import FusionDecision

if TYPE_CHECKING:
    from shardwright.kernels.grouped_lora_mlp.op import Adapter

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]

PROBES = 64
"""Values on which the plan's activation must be the family's own."""
PARAMETERS = ("limit", "alpha", "offset")
"""Constants of a decision that give an activation its numbers, in the operator's order."""


def whole_layer(module: nn.Module, name: str, decision: FusionDecision) -> Forward:
    """``moe_layer`` in place of the experts' forward.

    Raises:
        LegalityError: ``fusion-experts``.
    """
    experts, activation, layout = _bound(module, name, decision)
    if experts.ep != 1:
        raise _refused(name, f"moe_layer needs all experts on one rank; ep is {experts.ep}")
    if experts.padding > 1:
        raise _refused(name, f"the plan pads rows to {experts.padding}; moe_layer takes them where they are")
    op = OPERATORS["moe_layer"].load_op()

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if experts.meter.recording:
            experts.meter.add(name, rows_of_experts(top_k_index, experts.num_experts))
        if experts.meanwhile is not None:
            experts.meanwhile()
        up, low = _adapters(experts, hidden_states.dtype)
        out: Tensor = op(
            hidden_states.contiguous(),
            top_k_index.contiguous(),
            top_k_weights.contiguous(),
            getattr(experts, experts.layout.up),
            getattr(experts, experts.layout.down),
            up=up,
            low=low,
            activation=activation,
            layout=layout,
            **_biases(experts, hidden_states.dtype),
        )
        return out

    return forward


def received_rows(module: nn.Module, name: str, decision: FusionDecision) -> Forward:
    """``grouped_lora_mlp`` between dispatch and combine.

    Raises:
        LegalityError: ``fusion-experts``.
    """
    experts, activation, layout = _bound(module, name, decision)
    op = OPERATORS["grouped_lora_mlp"].load_op()

    def compute(rows: Tensor, route: Route) -> Tensor:
        up, low = _adapters(experts, rows.dtype)
        out: Tensor = op(
            rows.contiguous(),
            route.local_counts,
            getattr(experts, experts.layout.up),
            getattr(experts, experts.layout.down),
            up=up,
            low=low,
            activation=activation,
            layout=layout,
            **_biases(experts, rows.dtype),
        )
        return out

    return _exchanged(experts, compute)


def packed_rows(module: nn.Module, name: str, decision: FusionDecision) -> Forward:
    """``packed_experts`` between dispatch and combine, for stacks that stay packed.

    Raises:
        LegalityError: ``fusion-experts``.
    """
    experts, activation, layout = _bound(module, name, decision, packed=True)
    op = OPERATORS["packed_experts"].load_op()

    def compute(rows: Tensor, route: Route) -> Tensor:
        up, low = _adapters(experts, rows.dtype)
        out: Tensor = op(
            rows.contiguous(),
            route.local_counts,
            stack_of(experts, experts.layout.up),
            stack_of(experts, experts.layout.down),
            up=up,
            low=low,
            activation=activation,
            interleaved=layout.interleaved,
            **_biases(experts, rows.dtype),
        )
        return out

    return _exchanged(experts, compute)


def _exchanged(experts: LoraExperts, compute: Compute) -> Forward:
    """Rows sorted, moved and summed by the kernels of ``permute``, whose source both operators' hashes cover."""
    rows = KernelRows()

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts.exchanged(hidden_states, top_k_index, top_k_weights, compute, rows)

    return forward


def _bound(
    module: nn.Module, name: str, decision: FusionDecision, packed: bool = False
) -> tuple[LoraExperts, Activation, Layout]:
    """The experts and what the plan says about them, compared with the live module."""
    if not isinstance(module, LoraExperts):
        raise _refused(name, f"{type(module).__name__} is not run by this runtime's own experts")
    reads = isinstance(module.packing, str) if packed else module.packing is None
    if not reads:
        raise _refused(name, f"the stacks are kept as {module.packing or 'numbers'}, which this operator does not read")
    if module.weigh_inputs:
        raise _refused(name, "these experts weigh their inputs; the operator weighs outputs")
    for role, found in (("gate_up", module.layout.up), ("down", module.layout.down)):
        planned = decision.roles.get(role, decision.roles.get(f"{role}_proj", found))
        if planned != found:
            raise _refused(name, f"the plan binds {role} to {planned!r}, the family keeps it in {found!r}")
    activation = activation_of(decision, name)
    if activation.gated != module.layout.gated:
        raise _refused(name, f"the plan's activation is {activation.kind}, the experts keep {module.layout.gate} gate")
    _same_activation(module, activation, name)
    return module, activation, Layout(module.layout.order, module.layout.gate == "interleaved")


def _biases(experts: LoraExperts, dtype: torch.dtype) -> dict[str, Tensor]:
    """Frozen biases of this rank's experts, [L, F] and [L, H]; none where the family has none."""
    if not experts.layout.biased:
        return {}
    up, down = (getattr(experts, f"{name}_bias").detach() for name in (experts.layout.up, experts.layout.down))
    return {"up_bias": up.to(dtype), "down_bias": down.to(dtype)}


def activation_of(decision: FusionDecision, name: str) -> Activation:
    """The decision's ``activation`` with its numbers; the pattern of routed SwiGLU experts names none.

    Raises:
        LegalityError: ``fusion-experts`` for a kind that the operator has not.
    """
    kind = str(decision.constants.get("activation", "swiglu"))
    if kind not in GATED:
        raise _refused(name, f"activation {kind!r} is not one of {', '.join(GATED)}")
    default = Activation().parameters
    numbers = [float(decision.constants.get(key, value)) for key, value in zip(PARAMETERS, default, strict=True)]
    return Activation(kind, (numbers[0], numbers[1], numbers[2]))  # type: ignore[arg-type]


def _same_activation(experts: LoraExperts, activation: Activation, name: str) -> None:
    """The family's own gate and the plan's activation agree on values between −8 and 8, in fp64 on the host."""
    from shardwright.kernels.grouped_lora_mlp.reference import activate_reference

    gate = torch.linspace(-8, 8, PROBES, dtype=torch.float64)
    up = torch.linspace(5, -9, PROBES, dtype=torch.float64)
    if not activation.gated:
        merged, first, second = gate, gate, None
    else:
        interleaved = experts.layout.gate == "interleaved"
        merged = torch.stack((gate, up), -1).flatten() if interleaved else torch.cat((gate, up))
        first, second = gate, up
    ours = activate_reference(first, second, activation)
    theirs = experts.activate(merged.unsqueeze(0))[0]
    error = float((ours - theirs).abs().max())
    if not error <= 1e-9 * float(theirs.abs().max()):
        what = f"the plan's activation {activation.kind} differs from the family's by up to {error:.2e}"
        raise _refused(name, what)


def _adapters(experts: LoraExperts, dtype: torch.dtype) -> tuple[Adapter | None, Adapter | None]:
    from shardwright.kernels.grouped_lora_mlp.op import Adapter

    def one(stack: str) -> Any:
        factors = experts.adapter(stack, dtype)
        if factors is None:
            return None
        return Adapter(*for_each_expert(factors, experts.local), experts.scalings[stack])

    return one(experts.layout.up), one(experts.layout.down)


def _refused(name: str, what: str) -> LegalityError:
    return LegalityError(
        "fusion-experts", what, where=name, next_action="reject this proposal, or choose its eager variant"
    )
