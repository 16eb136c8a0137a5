"""A few tokens after a state, for evaluation and generation: no chunks, no gradient, one launch.

Legend: B sequences, T tokens, H key heads, HV value heads, K, V widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.guards import refuse
from shardwright.kernels.kda import configs, contract
from shardwright.kernels.kda.compute import check, check_decay
from shardwright.kernels.kda.documents import documents
from shardwright.kernels.kda.operands import GATE_CODES, Inputs, Settings
from shardwright.kernels.kda.step_triton import kda_step_kernel


def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    *,
    gate: str = "bounded",
    lower_bound: float = -5.0,
    beta_sigmoid: bool = True,
) -> tuple[Tensor, Tensor]:
    """The recurrence over T tokens (one, as a rule) of every sequence.

    Args:
        q, k, v, g, beta, A_log, dt_bias: as ``kda``, or as ``gated_delta`` where g is ``[B, T, HV]``.
        state: ``[B, HV, K, V]``, not changed.

    Returns:
        ``o [B, T, HV, V]`` in v's dtype and the state after, ``[B, HV, K, V]`` in fp32.

    Raises:
        KernelError: ``no-gradient`` where a tensor needs one: train with ``kda``; otherwise as ``kda``.
    """
    given = [tensor for tensor in (q, k, v, g, beta, A_log, dt_bias, state) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        what = "a step keeps nothing for a backward, and a tensor needs a gradient"
        raise refuse(contract.NAME, "no-gradient", what, "use kda, or torch.no_grad()")
    contract.check_gate(A_log, dt_bias, gate, lower_bound)
    inputs, settings = Inputs(q, k, v, g, beta, A_log, dt_bias, state), Settings(gate, lower_bound, beta_sigmoid)
    check(inputs, documents(q.shape[0], q.shape[1], q.device), settings)
    if gate == "given":
        check_decay(g)
    B, T, K, V = q.shape[0], q.shape[1], inputs.K, inputs.V
    o, after = torch.empty_like(v), torch.empty(state.shape, dtype=torch.float32, device=state.device)
    tile = configs.step(K)
    with device.current(q):
        kda_step_kernel[(V // tile.BV, inputs.HV, B)](
            q,
            k,
            v,
            g,
            beta,
            after if A_log is None else A_log,
            after if dt_bias is None else dt_bias,
            state,
            o,
            after,
            lower_bound,
            K**-0.5,
            T,
            inputs.HV,
            inputs.HV // inputs.H,
            K=K,
            V=V,
            BV=tile.BV,
            GATE=GATE_CODES[gate],
            CHANNELS=inputs.channels,
            SIGMOID=beta_sigmoid,
            **tile.options(),
        )
    return o, after
