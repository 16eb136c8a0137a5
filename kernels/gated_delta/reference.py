"""Gated DeltaNet in plain torch. Runs in fp64.

For each document and value head, with a state ``S [K, V]`` that starts at ``initial_state`` or zero::

    g_t    = -exp(A_log) softplus(a_t + dt_bias), one number for a head
    S      = exp(g_t) S
    S      = S + beta_t k_t (v_t - k_tᵀ S)ᵀ
    o_t    = Sᵀ q_t

where q and k are divided by ``sqrt(Σ² + 1e-6)`` per head and q is scaled by ``K ** -0.5``: KDA with the same gate in
every channel.

Legend: B batch, T tokens, H key heads, HV value heads (a multiple of H), K key width, V value width, N documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shardwright.kernels.kda.reference import kda_chunk_reference, kda_recurrent_reference, log_decay

Rule = Callable[..., tuple[Tensor, Tensor]]


def _by(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    gate: str,
    beta_sigmoid: bool,
    cu_seqlens: Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
    bias = None if dt_bias is None else dt_bias[:, None]
    wide = g if g.element_size() >= 4 else g.float()
    decay = log_decay(wide[..., None], A_log, bias, gate=gate, lower_bound=0.0).expand(*g.shape, q.shape[-1])
    return rule(
        q, k, v, decay, beta, None, None, initial_state, gate="given", beta_sigmoid=beta_sigmoid, cu_seqlens=cu_seqlens
    )


def gated_delta_recurrent_reference(
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
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, one token after another.

    Args:
        q, k: ``[B, T, H, K]``, before normalisation.
        v: ``[B, T, HV, V]``.
        g: raw gate ``[B, T, HV]``; the log-decay itself where ``gate`` is ``given``.
        beta: ``[B, T, HV]``, before the sigmoid unless ``beta_sigmoid`` is false.
        A_log, dt_bias: ``[HV]``; ``None`` where ``gate`` is ``given``.
        initial_state: ``[N, HV, K, V]``; zero where ``None``.
        cu_seqlens: N + 1 document bounds inside a batch of 1; each batch row is a document where ``None``.

    Returns:
        ``o [B, T, HV, V]`` in v's dtype and the final states ``[N, HV, K, V]`` in at least fp32.
    """
    rule = kda_recurrent_reference
    return _by(rule, q, k, v, g, beta, A_log, dt_bias, initial_state, gate, beta_sigmoid, cu_seqlens)


def gated_delta_chunk_reference(
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
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in chunks of 64 tokens, rounded as eager 16-bit code rounds. Arguments as the recurrence."""
    rule = kda_chunk_reference
    return _by(rule, q, k, v, g, beta, A_log, dt_bias, initial_state, gate, beta_sigmoid, cu_seqlens)
