"""KDA as a torch operator: guards, launches, gradient, fake tensors, torch.compile.

For a layer of a model (the convolution and the projections stay outside)::

    o, final_state = kda(q, k, v, g, beta, A_log, dt_bias, gate="bounded", lower_bound=-5.0)

takes q, k ``[B, T, H, K]`` before normalisation, v ``[B, T, HV, V]``, the raw gate g ``[B, T, HV, K]`` and the raw
beta ``[B, T, HV]``, and gives what ``reference.kda_recurrent_reference`` gives for the same arguments. In the terms
of flash-linear-attention that is ``chunk_kda(..., use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0)``; without a bound ``gate="softplus"``; with decays
and betas computed outside ``gate="given", beta_sigmoid=False``. The scale is always ``K ** -0.5``.

Only the inputs and the output are kept for the backward, which computes the forward's intermediates again, unless
``keep`` asks for them to be kept.

Legend: B batch, T tokens, N documents, H key heads, HV value heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device, guards
from shardwright.kernels.dispatch import direct
from shardwright.kernels.guards import refuse
from shardwright.kernels.kda import chain, contract, launches
from shardwright.kernels.kda.documents import Documents, documents
from shardwright.kernels.kda.gradient_launches import Flow, Gradients, gradient
from shardwright.kernels.kda.operands import Inputs, Prepared, Settings

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""q, k, v, g, beta, A_log, dt_bias, initial_state."""


def check(inputs: Inputs, docs: Documents, settings: Settings) -> None:
    """All guards, on real tensors.

    Raises:
        KernelError: as ``contract.check_static``; also ``device-mixed``, ``device-unsupported``, ``not-contiguous``
            or ``misaligned``.
    """
    named = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    contract.check_static(
        **named,
        gate=settings.gate,
        lower_bound=settings.lower_bound,
        count=docs.count,
        channels=inputs.g.dim() != 3,
    )
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
    """What a forward leaves for its backward where time matters more than memory: some nine widths of q's dtype."""

    found: Prepared
    states: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order that ``of`` takes."""
        return (*(getattr(self.found, field.name) for field in fields(Prepared)), self.states)

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Kept:
        """From what ``tensors`` gave."""
        *found, states = tensors
        return Kept(Prepared(*found), states)


def compute_forward(
    inputs: Inputs, docs: Documents, settings: Settings, with_final: bool, keep: bool = False
) -> tuple[Tensor, Tensor | None, Kept | None]:
    """``o [B, T, HV, V]`` in v's dtype, the final states ``[N, HV, K, V]`` in fp32, and with ``keep`` what is kept."""
    check(inputs, docs, settings)
    o = torch.empty_like(inputs.v)
    shape = (docs.count, inputs.HV, inputs.K, inputs.V)
    final = torch.empty(shape, dtype=torch.float32, device=o.device) if with_final else None
    found = launches.prepare(inputs, docs, settings, keep)
    states = inputs.q.new_empty((docs.chunks, inputs.HV, inputs.K, inputs.V)) if keep else None
    chain.scan(inputs, docs, found, o=o, final_state=final, states=states)
    return o, final, None if states is None else Kept(found, states)


def compute_backward(
    inputs: Inputs,
    docs: Documents,
    settings: Settings,
    o: Tensor,
    do: Tensor,
    dfinal: Tensor | None,
    kept: Kept | None = None,
) -> tuple[Gradients, Tensor | None]:
    """Gradients of all inputs, and of the initial state where there is one; ``o`` is the forward's output."""
    do = do.to(inputs.v.dtype).contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    if kept is None:
        found = launches.prepare(inputs, docs, settings, True)
        states = inputs.q.new_empty((docs.chunks, inputs.HV, inputs.K, inputs.V))
        chain.scan(inputs, docs, found, states=states)
        kept = Kept(found, states)
    start = inputs.initial_state
    dinitial = None if start is None else torch.empty(start.shape, dtype=torch.float32, device=start.device)
    dstates, dnew = chain.reverse(inputs, docs, kept.found, do, dfinal, dinitial)
    flow = Flow(kept.found.inside(), o, do, dnew, kept.states, dstates)
    del kept
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
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, initial_state, o, *(kept.tensors() if kept else ()))
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
        kept = Kept.of(rest) if rest else None
        found, dinitial = compute_backward(inputs, ctx.docs, ctx.settings, o, do, dfinal, kept)
        given = (found.q, found.k, found.v, found.g, found.beta, found.A_log, found.dt_bias, dinitial)
        return (*given, None, None, None, None)


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
def _(
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
    count = len(bounds) - 1 if bounds else q.shape[0]
    contract.check_static(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        gate=gate,
        lower_bound=lower_bound,
        count=count,
        channels=g.dim() != 3,
    )
    return torch.empty_like(v), v.new_empty((count, v.shape[2], q.shape[3], v.shape[3]), dtype=torch.float32)


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
def _(
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
    given = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return [q.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in given]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], output[0])
    ctx.settings = inputs[8:]


def _differentiate(ctx: Any, do: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
    *saved, o = ctx.saved_tensors
    found = kda_backward(o, do, dfinal, *saved, *ctx.settings)
    kept = [None if tensor is None else grad for tensor, grad in zip(saved, found, strict=True)]
    return (*kept, None, None, None, None)


kda_forward.register_autograd(_differentiate, setup_context=_save)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    gate: str = "bounded",
    lower_bound: float = -5.0,
    beta_sigmoid: bool = True,
    cu_seqlens: Tensor | Sequence[int] | Documents | None = None,
    output_final_state: bool = False,
    keep: bool = False,
    decays: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences (module docstring; mathematics in ``reference``).

    Args:
        q, k: ``[B, T, H, K]``, contiguous, bf16, before normalisation; fp32 under the interpreter only, where it
            shows what the algorithm itself rounds.
        v: ``[B, T, HV, V]`` of the same dtype; HV is a multiple of H.
        g: raw gate ``[B, T, HV, K]``; the log-decay itself, at most 0, where ``gate`` is ``given``.
        beta: ``[B, T, HV]``, before the sigmoid unless ``beta_sigmoid`` is false.
        A_log, dt_bias: ``[HV]`` and ``[HV, K]``, of their own dtype; ``None`` where ``gate`` is ``given``.
        initial_state: ``[N, HV, K, V]``; zero where ``None``.
        gate: ``bounded`` (``lower_bound · σ(exp(A_log)(g + dt_bias))``), ``softplus`` or ``given``.
        lower_bound: in [-5, 0), for ``bounded``.
        cu_seqlens: N + 1 bounds of documents packed into a batch of 1. A device tensor is read, which waits for
            the device: give the numbers, or ``documents(...)`` made once a batch.
        output_final_state: whether the final states are wanted.
        keep: whether the backward finds the forward's tiles and states instead of making them again: three launches
            less for some nine widths of memory between the two. Right under activation checkpointing, where the
            forward runs again just before. Tracers always make them again.
        decays: whether a log-decay that is given is known to be at most 0, as the formula that made it may guarantee.
            Otherwise its largest value is read, which waits for the device.

    Returns:
        ``o [B, T, HV, V]`` in v's dtype, and the final states ``[N, HV, K, V]`` in fp32 or ``None``.

    Raises:
        KernelError: an input outside the contract: ``check``, ``check_decay``, ``documents.documents``.
    """
    if g.dim() == 3:
        what = f"g is {list(g.shape)}: one gate for a head"
        raise refuse(contract.NAME, "wrong-shape", what, "pass g [B, T, HV, K], or use gated_delta")
    settings = Settings(gate, lower_bound, beta_sigmoid)
    operands = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return run(operands, settings, cu_seqlens, output_final_state, keep, decays)


def run(
    operands: Operands,
    settings: Settings,
    cu_seqlens: Tensor | Sequence[int] | Documents | None,
    output_final_state: bool,
    keep: bool,
    decays: bool,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule on ``(q, k, v, g, beta, A_log, dt_bias, initial_state)``; the rest as ``kda``.

    A gate ``[B, T, HV]`` is that of a head, ``[B, T, HV, K]`` that of every channel.
    """
    q, _, _, g, _, A_log, dt_bias, _ = operands
    contract.check_gate(A_log, dt_bias, settings.gate, settings.lower_bound)
    given = [tensor for tensor in operands if tensor is not None]
    plain = direct(*given)
    if settings.gate == "given" and plain and not decays and g.numel():
        check_decay(g)
    if not plain:
        bounds = cu_seqlens.bounds if isinstance(cu_seqlens, Documents) else cu_seqlens
        numbers = bounds.tolist() if isinstance(bounds, Tensor) else list(bounds or ())
        o, final = kda_forward(*operands, numbers, settings.gate, settings.lower_bound, settings.beta_sigmoid)
        return o, final if output_final_state else None
    docs = documents(q.shape[0], q.shape[1], q.device, cu_seqlens)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        out = Kda.apply(*operands, docs, settings, output_final_state, keep)
        return cast(tuple[Tensor, Tensor | None], out)
    return compute_forward(Inputs(*operands), docs, settings, output_final_state)[:2]
