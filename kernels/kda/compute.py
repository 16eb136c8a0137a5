"""The delta rule on checked inputs: guards, launches forward and backward, the short way for plain tensors.

Legend: B batch, T tokens, N documents, H key heads, HV value heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device, guards
from shardwright.kernels.guards import refuse
from shardwright.kernels.kda import chain, contract, launches
from shardwright.kernels.kda.documents import Documents
from shardwright.kernels.kda.flow import Flow
from shardwright.kernels.kda.gradient_launches import Gradients, gradient
from shardwright.kernels.kda.operands import Inputs, Prepared, Settings, Solved


def check_shapes(inputs: Inputs, settings: Settings, documents: int) -> None:
    """The contract's own guards, on fake tensors too.

    Raises:
        KernelError: as ``contract.check_static``.
    """
    contract.check_static(
        **{name: getattr(inputs, name) for name in inputs.__dataclass_fields__},
        gate=settings.gate,
        lower_bound=settings.lower_bound,
        count=documents,
        channels=inputs.g.dim() != 3,
    )


def check(inputs: Inputs, docs: Documents, settings: Settings) -> None:
    """All guards, on real tensors.

    Raises:
        KernelError: as ``contract.check_static``; also ``device-mixed``, ``device-unsupported``, ``not-contiguous``
            or ``misaligned``.
    """
    check_shapes(inputs, settings, docs.count)
    named = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    guards.one_device(contract.NAME, given, interpreted=device.interpreted())
    if inputs.q.is_cuda and inputs.value_bytes == 4:
        raise refuse(contract.NAME, "dtype-unsupported", "fp32 on a device", "cast to bf16, or keep eager here")
    numbers = ("beta",) if inputs.channels else ("beta", "g", "A_log", "dt_bias")
    guards.dense(contract.NAME, {name: tensor for name, tensor in given.items() if name not in numbers})
    for name in numbers:
        if name in given and not given[name].is_contiguous():
            what = f"{name} has gaps or a permuted layout"
            raise refuse(contract.NAME, "not-contiguous", what, f"pass {name}.contiguous()")


def check_decay(g: Tensor) -> None:
    """A log-decay that is given must be at most 0. Waits for the device.

    Raises:
        KernelError: ``gate-positive``.
    """
    largest = float(g.detach().max())
    if not largest <= 0:
        what = f"the largest log-decay is {largest}"
        raise refuse(contract.NAME, "gate-positive", what, "pass log-decays <= 0, or the raw gate and its parameters")


@dataclass
class Kept:
    """What a forward leaves for its backward: pairs and inverse, one width of q's dtype; the rest is eight more."""

    solved: Solved
    found: Prepared | None = None
    states: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order that ``of`` takes."""
        if self.found is None or self.states is None:
            return _tensors(self.solved)
        return (*_tensors(self.found), self.states)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Kept:
        """From what ``tensors`` gave."""
        if len(tensors) == len(fields(Solved)):
            return Kept(Solved(*tensors))
        *found, states = tensors
        prepared = Prepared(*found)
        return Kept(prepared.solved(), prepared, states)


def _tensors(parts: Solved | Prepared) -> tuple[Tensor, ...]:
    return tuple(getattr(parts, field.name) for field in fields(parts))


def compute_forward(
    inputs: Inputs, docs: Documents, settings: Settings, with_final: bool, keep: bool = False
) -> tuple[Tensor, Tensor | None, Kept]:
    """``o [B, T, HV, V]`` in v's dtype, the final states ``[N, HV, K, V]`` in fp32, and what may be kept: all with
    ``keep``."""
    check(inputs, docs, settings)
    o = torch.empty_like(inputs.v)
    shape = (docs.count, inputs.HV, inputs.K, inputs.V)
    final = torch.empty(shape, dtype=torch.float32, device=o.device) if with_final else None
    found = launches.prepare(inputs, docs, settings)
    states = inputs.q.new_empty((docs.chunks, inputs.HV, inputs.K, inputs.V)) if keep else None
    chain.scan(inputs, docs, found, o=o, final_state=final, states=states)
    return o, final, Kept(found.solved(), found if keep else None, states)


def compute_backward(
    inputs: Inputs, docs: Documents, settings: Settings, o: Tensor, do: Tensor, dfinal: Tensor | None, kept: Kept
) -> tuple[Gradients, Tensor | None]:
    """Gradients of all inputs, and of the initial state where there is one; ``o`` is the forward's output."""
    do = do.to(inputs.v.dtype).contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    found, states = kept.found, kept.states
    if found is None or states is None:
        found = launches.prepare(inputs, docs, settings, kept.solved)
        states = inputs.q.new_empty((docs.chunks, inputs.HV, inputs.K, inputs.V))
        chain.scan(inputs, docs, found, states=states)
    start = inputs.initial_state
    dinitial = None if start is None else torch.empty(start.shape, dtype=torch.float32, device=start.device)
    dstates, dnew, dv = chain.reverse(inputs, docs, found, do, dfinal, dinitial)
    flow = Flow(found.inside(), o, do, dnew, dv, states, dstates)
    del found, kept
    gradients = gradient(inputs, docs, settings, flow)
    return gradients, None if dinitial is None or start is None else dinitial.to(start.dtype)


class Kda(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        initial_state: Tensor | None,
        docs: Documents,
        settings: Settings,
        with_final: bool,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state)
        o, final, kept = compute_forward(inputs, docs, settings, with_final, keep)
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, initial_state, o, *kept.tensors())
        ctx.docs, ctx.settings = docs, settings
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, o, rest = Inputs(*saved[:8]), saved[8], saved[9:]
        del saved
        if do is None:
            do = torch.zeros_like(inputs.v)
        found, dinitial = compute_backward(inputs, ctx.docs, ctx.settings, o, do, dfinal, Kept.of(rest))
        given = (found.q, found.k, found.v, found.g, found.beta, found.A_log, found.dt_bias, dinitial)
        return (*given, None, None, None, None)
