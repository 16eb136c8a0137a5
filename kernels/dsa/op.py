"""Latent attention over selected keys, or over all: one front door for layers with an indexer and without.

With ``indices`` the queries are absorbed and ``attention.op.dsa_attention`` reads the latents of the selected keys.
Without, keys and values are made of the latents and a library attends to all of them (``dense``): layers
without an indexer, and layers whose documents are no longer than their selection (``attention.choose`` says which).
A gate multiplies the output after the value projection by its sigmoid, in one pass.

Legend: T queries, S keys, H heads, N width of a key without its rotated part, R rotated width, V width of a value,
C width of the latent, K selected keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.kernels.dsa import contract
from shardwright.kernels.dsa.attention.op import dsa_attention
from shardwright.kernels.dsa.dense import gated_mla_attention, sigmoid_gate
from shardwright.kernels.dsa.up_projection import UpProjection


def latent_attention(
    q_nope: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    up: UpProjection,
    indices: Tensor | None,
    gate: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    bounds: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
    deterministic: bool | None = None,
    check_indices: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of packed documents over latent keys.

    Args:
        q_nope: ``[T, H, N]``, not absorbed.
        q_rope: ``[T, H, R]``, rotated; ``None``, with ``k_rope``, where the layer rotates nothing.
        latent: ``[S, C]``, normed.
        k_rope: ``[S, R]``.
        up: keys and values of a latent.
        indices: ``[T, K]`` int32 as of ``dsa_indexer``; ``None`` attends to all that ``cu_seqlens`` lets a query see.
        gate: ``[T, H, V]`` before its sigmoid.
        sinks: ``[H]``, only with ``indices``.
        scale: of the scores.
        bounds: ``[T, 2]`` int32 (``attention.visibility``), with ``indices``: entries outside count as -1.
        cu_seqlens: ends of the documents on the host, without ``indices``.
        deterministic, check_indices: see ``dsa_attention``.

    Returns:
        o ``[T, H, V]``; lse ``[T, H]`` fp32 where keys were selected, else ``None``.

    Raises:
        KernelError: ``contract.check_static``, and what the parts refuse.
    """
    contract.check_static(
        q_nope,
        q_rope,
        latent,
        k_rope,
        up.weight,
        gate,
        value=up.value,
        sinks=sinks is not None,
        dense=indices is None,
    )
    if indices is None:
        keys, values = up.expand(latent)
        q, k = q_nope, keys
        if q_rope is not None and k_rope is not None:
            rotated = k_rope[:, None].expand(-1, up.heads, -1)
            q, k = torch.cat((q_nope, q_rope), -1), torch.cat((keys, rotated), -1)
        return gated_mla_attention(q, k, values, gate, scale=scale, cu_seqlens=cu_seqlens), None
    mixed, lse = dsa_attention(
        up.absorb(q_nope),
        q_rope,
        latent,
        k_rope,
        indices,
        None,
        sinks,
        scale=scale,
        bounds=bounds,
        deterministic=deterministic,
        check_indices=check_indices,
    )
    o = up.values(mixed)
    return (o if gate is None else sigmoid_gate(o.contiguous(), gate)), lse
