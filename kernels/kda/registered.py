"""The delta rule as registered operators: one opaque node for whatever traces, with its gradient and fake tensors.

Both take the eight tensors of ``Inputs`` in their order, for a registered operator takes no objects.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels.kda.compute import Kept, check_shapes, compute_backward, compute_forward
from shardwright.kernels.kda.configs import CHUNK
from shardwright.kernels.kda.documents import documents
from shardwright.kernels.kda.operands import Inputs, Settings, Solved


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
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``o`` and the final states as one opaque node for tracers; ``bounds`` empty where each row is a document.

    With ``learns`` also the fields of ``Solved`` for the backward; empty tensors otherwise.
    """
    inputs = Inputs(q, k, v, g, beta, A_log, dt_bias, initial_state)
    docs = documents(q.shape[0], q.shape[1], q.device, bounds or None)
    o, final, kept = compute_forward(inputs, docs, Settings(gate, lower_bound, beta_sigmoid), True)
    assert final is not None
    if learns:
        return o, final, kept.solved.p, kept.solved.inverse, kept.solved.norms
    return o, final, q.new_empty(0), q.new_empty(0), q.new_empty(0, dtype=torch.float32)


@kda_forward.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs, bounds, settings, learns = Inputs(*given[:8]), given[8], Settings(*given[9:12]), given[12]
    B, T = inputs.q.shape[:2]
    count = len(bounds) - 1 if bounds else B
    check_shapes(inputs, settings, count)
    final = inputs.v.new_empty((count, inputs.HV, inputs.K, inputs.V), dtype=torch.float32)
    chunks = sum(-(-(high - low) // CHUNK) for low, high in pairwise(bounds)) if bounds else B * -(-T // CHUNK)
    square, pair = ((chunks, inputs.HV, n, CHUNK) if learns else (0,) for n in (CHUNK, 2))
    p, inverse = (inputs.q.new_empty(square) for _ in range(2))
    return torch.empty_like(inputs.v), final, p, inverse, inputs.q.new_empty(pair, dtype=torch.float32)


@torch.library.custom_op("shardwright::kda_backward", mutates_args=())
def kda_backward(
    o: Tensor,
    do: Tensor,
    dfinal: Tensor,
    p: Tensor,
    inverse: Tensor,
    norms: Tensor,
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
    settings, kept = Settings(gate, lower_bound, beta_sigmoid), Kept(Solved(p, inverse, norms))
    found, dinitial = compute_backward(inputs, docs, settings, o, do, dfinal, kept)
    all_found = (found.q, found.k, found.v, found.g, found.beta, found.A_log, found.dt_bias, dinitial)
    return [q.new_empty(0) if tensor is None else tensor for tensor in all_found]


@kda_backward.register_fake
def _(*given: Any) -> list[Tensor]:
    return [given[0].new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in given[6:14]]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    o, _, *solved = output
    ctx.save_for_backward(*inputs[:8], o, *solved)
    ctx.settings = inputs[8:12]


def _differentiate(ctx: Any, do: Tensor, dfinal: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    given, (o, *solved) = saved[:8], saved[8:]
    found = kda_backward(o, do, dfinal, *solved, *given, *ctx.settings)
    kept = [None if tensor is None else grad for tensor, grad in zip(given, found, strict=True)]
    return (*kept, None, None, None, None, None)


kda_forward.register_autograd(_differentiate, setup_context=_save)
