"""KDA over a sequence whose pieces lie on several ranks in order: states pass, tokens do not.

A rank's tokens move the state by ``S⁺ = M S + N`` (``segments_triton``). Ranks gather ``[N | M]``, ``[HV, K, V + K]``
in fp32, once in the forward; each then knows its first state, and runs its own chunks. In the backward they gather
what each rank's own outputs give to its first state, ``[HV, K, V]``, and the gradient moves by the transposed M.
So a layer sends ``HV K (V + K)`` and ``HV K V`` numbers a rank whatever the length of the sequence.

The collective is the caller's: ``gather`` makes ``[R, ...]`` of a tensor of every rank, in the order of the sequence.

Legend: R ranks, T tokens of this rank, N documents on it, HV value heads, K, V widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels.guards import refuse
from shardwright.kernels.kda import chain, contract, launches, segments
from shardwright.kernels.kda.compute import check, check_decay
from shardwright.kernels.kda.documents import Documents, documents
from shardwright.kernels.kda.flow import Flow
from shardwright.kernels.kda.gradient_launches import gradient
from shardwright.kernels.kda.op import Operands
from shardwright.kernels.kda.operands import Inputs, Prepared, Settings, Solved


@dataclass(frozen=True)
class Neighbours:
    """This rank's place in the sequence."""

    rank: int
    gather: Callable[[Tensor], Tensor]
    """A tensor of this rank → those of all ranks, stacked in the order of the sequence. A collective."""
    continues: bool
    """Whether this rank's first document began on an earlier rank."""


def _effect(inputs: Inputs, docs: Documents, found: Prepared, place: Neighbours) -> Tensor:
    """``[N | M]`` of this rank; M is zero where a document begins here, so that nothing passes it."""
    effect = segments.summaries(inputs, docs, found, docs.first[-2:].contiguous())[0]
    if docs.count > 1 or not place.continues:
        effect[..., inputs.V :] = 0
    return effect


def arriving(effects: Tensor, rank: int, V: int) -> Tensor:
    """The state before this rank's first token ``[HV, K, V]``, from all ranks' ``[R, HV, K, V + K]``."""
    state = torch.zeros_like(effects[0, ..., :V])
    for before in effects[:rank]:
        state = before[..., :V] + before[..., V:] @ state
    return state


def returning(effects: Tensor, owns: Tensor, rank: int, V: int) -> Tensor:
    """The gradient of the state after this rank's last token ``[HV, K, V]``, from what later ranks give."""
    state = torch.zeros_like(owns[0])
    for after in reversed(range(rank + 1, len(owns))):
        state = owns[after] + effects[after, ..., V:].mT @ state
    return state


def _first_states(arrived: Tensor, docs: Documents, place: Neighbours) -> Tensor:
    """``[N, HV, K, V]``: the arriving state for a document that continues, zeros for those that begin here."""
    states = arrived.new_zeros((docs.count, *arrived.shape))
    if place.continues:
        states[0] = arrived
    return states


class KdaContext(torch.autograd.Function):
    """Forward and backward; each gathers once."""

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
        docs: Documents,
        settings: Settings,
        place: Neighbours,
    ) -> tuple[Tensor, Tensor]:
        inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, None)
        found = launches.prepare(inputs, docs, settings)
        effects = place.gather(_effect(inputs, docs, found, place))
        arrived = arriving(effects, place.rank, inputs.V)
        inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, _first_states(arrived, docs, place))
        o = torch.empty_like(v)
        final = torch.empty((docs.count, inputs.HV, inputs.K, inputs.V), dtype=torch.float32, device=v.device)
        chain.scan(inputs, docs, found, o=o, final_state=final)
        solved = found.solved()
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, o, effects, solved.p, solved.inverse, solved.norms)
        ctx.settings = docs, settings, place
        ctx.mark_non_differentiable(final)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, o, effects, p, inverse, norms = ctx.saved_tensors
        docs, settings, place = ctx.settings
        V = given[2].shape[3]
        arrived = arriving(effects, place.rank, V)
        q, k, v, g, beta, A_log, dt_bias = given
        inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, _first_states(arrived, docs, place))
        do = do.to(o.dtype).contiguous()
        found = launches.prepare(inputs, docs, settings, Solved(p, inverse, norms))
        states = inputs.q.new_empty((docs.chunks, inputs.HV, inputs.K, V))
        chain.scan(inputs, docs, found, states=states)
        own = segments.ends(inputs, docs, found, do, docs.first[:2].contiguous())[0]
        owns = place.gather(own if place.continues else torch.zeros_like(own))
        after = own.new_zeros((docs.count, *own.shape))
        after[-1] = returning(effects, owns, place.rank, V)
        dstates, dnew, dv = chain.reverse(inputs, docs, found, do, after, None)
        flow = Flow(found.inside(), o, do, dnew, dv, states, dstates)
        del found
        back = gradient(inputs, docs, settings, flow)
        return back.q, back.k, back.v, back.g, back.beta, back.A_log, back.dt_bias, None, None, None


def delta_rule_context(
    operands: Operands,
    settings: Settings,
    place: Neighbours,
    cu_seqlens: Documents | tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """One layer over the whole sequence, for the tokens of this rank. Every rank must call it, and run its backward.

    Args:
        operands: ``(q, k, v, g, beta, A_log, dt_bias, None)`` of this rank, as ``kda`` or ``gated_delta`` take them;
            one row, B = 1. A document's state starts at zero.
        cu_seqlens: bounds of this rank's documents; the first is a document's later part where ``place`` says that
            it continues.

    Returns:
        ``o [1, T, HV, V]``, and this rank's final states ``[N, HV, K, V]`` in fp32, without a gradient.

    Raises:
        KernelError: as ``kda``; ``wrong-shape`` for more than one row or an initial state; ``bad-documents`` where
            the first or last document of a rank is empty.
    """
    q, _, _, g, _, A_log, dt_bias, initial = operands
    contract.check_gate(A_log, dt_bias, settings.gate, settings.lower_bound)
    if q.shape[0] != 1 or initial is not None:
        what = f"{q.shape[0]} rows, {'an' if initial is not None else 'no'} initial state"
        raise refuse(contract.NAME, "wrong-shape", what, "pass one row and no initial state")
    docs = documents(1, q.shape[1], q.device, cu_seqlens)
    if docs.bounds[0] == docs.bounds[1] or docs.bounds[-1] == docs.bounds[-2]:
        what = f"documents are {docs.bounds}"
        raise refuse(contract.NAME, "bad-documents", what, "leave out empty documents at a rank's border")
    check(Inputs(*operands), docs, settings)
    if settings.gate == "given":
        check_decay(g)
    return cast(tuple[Tensor, Tensor], KdaContext.apply(*operands[:7], docs, settings, place))
