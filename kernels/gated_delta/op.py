"""Gated DeltaNet as a torch operator: the delta rule's launches with one gate for a head.

``o, final_state = gated_delta(q, k, v, a, b, A_log, dt_bias)`` takes q, k before normalisation and raw a and b, as
Qwen3-Next's and Qwen3.5's linear attention have them after their convolution, and gives what
``reference.gated_delta_recurrent_reference`` gives for the same arguments. The gate stays ``[B, T, HV]``: it is never
widened to channels.

Legend: B batch, T tokens, N documents, H key heads, HV value heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardwright.kernels.gated_delta import contract
from shardwright.kernels.guards import refuse
from shardwright.kernels.kda.documents import Documents
from shardwright.kernels.kda.op import run
from shardwright.kernels.kda.operands import Settings


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    gate: str = "softplus",
    beta_sigmoid: bool = True,
    cu_seqlens: Tensor | Sequence[int] | Documents | None = None,
    output_final_state: bool = False,
    keep: bool = False,
    decays: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over whole sequences (module docstring).

    Args:
        q, k: ``[B, T, H, K]``, contiguous, bf16, before normalisation; fp32 under the interpreter only.
        v: ``[B, T, HV, V]`` of the same dtype; HV is a multiple of H.
        g: raw gate ``[B, T, HV]``; the log-decay itself, at most 0, where ``gate`` is ``given``.
        beta: ``[B, T, HV]``, before the sigmoid unless ``beta_sigmoid`` is false.
        A_log, dt_bias: ``[HV]``, of their own dtype; ``None`` where ``gate`` is ``given``.
        initial_state: ``[N, HV, K, V]``; zero where ``None``.
        gate: ``softplus`` (``-exp(A_log) softplus(g + dt_bias)``) or ``given``.
        cu_seqlens, output_final_state, keep, decays: as ``kda``.

    Returns:
        ``o [B, T, HV, V]`` in v's dtype, and the final states ``[N, HV, K, V]`` in fp32 or ``None``.

    Raises:
        KernelError: an input outside the contract, as ``kda``; ``wrong-shape`` for a gate of every channel.
    """
    contract.check_gate(gate)
    if g.dim() != 3:
        what = f"g is {list(g.shape)}"
        raise refuse(contract.NAME, "wrong-shape", what, "pass g [B, T, HV], or use kda for a gate of every channel")
    settings = Settings(gate, -5.0, beta_sigmoid)
    operands = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    return run(operands, settings, cu_seqlens, output_final_state, keep, decays)
