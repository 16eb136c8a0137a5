"""KDA as a torch operator: guards, launches, gradient, fake tensors, torch.compile.

For a layer of a model (the convolution and the projections stay outside)::

    o, final_state = kda(q, k, v, g, beta, A_log, dt_bias, gate="bounded", lower_bound=-5.0)

takes q, k ``[B, T, H, K]`` before normalisation, v ``[B, T, HV, V]``, the raw gate g ``[B, T, HV, K]`` and the raw
beta ``[B, T, HV]``, and gives what ``reference.kda_recurrent_reference`` gives for the same arguments. In the terms
of flash-linear-attention that is ``chunk_kda(..., use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0)``; without a bound ``gate="softplus"``; with decays
and betas computed outside ``gate="given", beta_sigmoid=False``. The scale is always ``K ** -0.5``.

For the backward the inputs, the output and, in one width more, what costs most to make again are kept: pairs and
inverse of every chunk (``operands.Solved``). The rest is computed again, unless ``keep`` asks for it to be kept.

Legend: B batch, T tokens, N documents, H key heads, HV value heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from shardwright.kernels.dispatch import direct
from shardwright.kernels.guards import refuse
from shardwright.kernels.kda import contract
from shardwright.kernels.kda.compute import Kda, check_decay, compute_forward
from shardwright.kernels.kda.documents import Documents, documents
from shardwright.kernels.kda.operands import Inputs, Settings
from shardwright.kernels.kda.registered import kda_forward

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""q, k, v, g, beta, A_log, dt_bias, initial_state."""


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
        keep: whether the backward finds all of the forward's tiles and states instead of making them again: three
            launches less for some eight widths of memory more between the two. Right under activation checkpointing,
            where the forward runs again just before. Tracers always make them again.
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
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    if settings.gate == "given" and plain and not decays and g.numel():
        check_decay(g)
    if not plain:
        bounds = cu_seqlens.bounds if isinstance(cu_seqlens, Documents) else cu_seqlens
        numbers = bounds.tolist() if isinstance(bounds, Tensor) else list(bounds or ())
        named = (settings.gate, settings.lower_bound, settings.beta_sigmoid)
        o, final, *_ = kda_forward(*operands, numbers, *named, learns)
        return o, final if output_final_state else None
    docs = documents(q.shape[0], q.shape[1], q.device, cu_seqlens)
    if learns:
        out = Kda.apply(*operands, docs, settings, output_final_state, keep)
        return cast(tuple[Tensor, Tensor | None], out)
    return compute_forward(Inputs(*operands), docs, settings, output_final_state)[:2]
