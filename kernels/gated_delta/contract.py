"""What Gated DeltaNet demands of its inputs, and what a fusion that uses it must prove. No torch.

Legend: B batch, T tokens, H key heads, HV value heads, K key width, V value width, N documents.
"""

from __future__ import annotations

from shardwright.kernels.guards import TensorLike, refuse
from shardwright.kernels.kda import contract as kda_contract
from shardwright.kernels.kda.contract import DTYPES, OBLIGATIONS, WIDTHS

NAME = "gated_delta"
GATES = ("softplus", "given")

ROLES = {
    "q": "activation [B, T, H, K]",
    "k": "activation [B, T, H, K]",
    "v": "activation [B, T, HV, V]",
    "g": "activation [B, T, HV]",
    "beta": "activation [B, T, HV]",
    "A_log": "parameter [HV]",
    "dt_bias": "parameter [HV]",
    "o": "activation [B, T, HV, V]",
}

__all__ = ["DTYPES", "GATES", "NAME", "OBLIGATIONS", "ROLES", "WIDTHS", "check_static"]


def check_static(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike,
    g: TensorLike,
    beta: TensorLike,
    A_log: TensorLike | None,
    dt_bias: TensorLike | None,
    initial_state: TensorLike | None,
    *,
    gate: str,
    count: int,
) -> None:
    """What can be refused from shapes, dtypes and settings alone (fake tensors too).

    Args:
        count: number of documents.

    Raises:
        KernelError: as ``kda.contract.check_static``, in this operator's name.
    """
    check_gate(gate)
    kda_contract.check_static(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        gate=gate,
        lower_bound=kda_contract.LOWEST,
        count=count,
        channels=False,
    )


def check_gate(gate: str) -> None:
    """The gate is one that this operator has.

    Raises:
        KernelError: ``unknown-gate``.
    """
    if gate not in GATES:
        raise refuse(NAME, "unknown-gate", f"gate is {gate!r}", f"use one of {', '.join(GATES)}")
