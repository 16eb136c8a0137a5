"""The delta rule as registered operators: one opaque node for whatever traces, with its gradient and fake tensors.

Both take the eight tensors of ``Inputs`` in their order, for a registered operator takes no objects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.kda.compute import check_shapes, compute_backward, compute_forward
from shardwright.kernels.kda.documents import documents
from shardwright.kernels.kda.operands import Inputs, Settings


@torch.library.custom_op("shardwright::kda_forward", mutates_args=())
def kda_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    bounds: list[int],
    gate: str,
    lower_bound: float,
    beta_sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    """``o`` and the final states as one opaque node for tracers; ``bounds`` empty where each row is a document."""
    inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state)
    docs = documents(q.shape[0], q.shape[1], q.device, bounds or None)
    o, final, _ = compute_forward(inputs, docs, Settings(gate, lower_bound, beta_sigmoid), True)
    assert final is not None
    return o, final


@kda_forward.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    inputs, bounds, settings = Inputs(*given[:8]), given[8], Settings(*given[9:])
    count = len(bounds) - 1 if bounds else inputs.q.shape[0]
    check_shapes(inputs, settings, count)
    shape = (count, inputs.HV, inputs.K, inputs.V)
    return torch.empty_like(inputs.v), inputs.v.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("shardwright::kda_backward", mutates_args=())
def kda_backward(
    o: Tensor,
    do: Tensor,
    dfinal: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    bounds: list[int],
    gate: str,
    lower_bound: float,
    beta_sigmoid: bool,
) -> list[Tensor]:
    """Gradients of the eight tensors; empty ones for those that are not there."""
    inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state)
    docs = documents(q.shape[0], q.shape[1], q.device, bounds or None)
    found, dinitial = compute_backward(inputs, docs, Settings(gate, lower_bound, beta_sigmoid), o, do, dfinal)
    all_found = (found.q, found.k, found.v, found.g, found.beta, found.A_log, found.dt_bias, dinitial)
    return [q.new_empty(0) if tensor is None else tensor for tensor in all_found]


@kda_backward.register_fake
def _(o: Tensor, do: Tensor, dfinal: Tensor, *given: Any) -> list[Tensor]:
    return [o.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in given[:8]]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], output[0])
    ctx.settings = inputs[8:]


def _differentiate(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
    *saved, o = ctx.saved_tensors
    found = kda_backward(o, do, dfinal, *saved, *ctx.settings)
    kept = [None if tensor is None else grad for tensor, grad in zip(saved, found, strict=True)]
    return (*kept, None, None, None, None)


kda_forward.register_autograd(_differentiate, setup_context=_save)
