"""Sparse attention as a torch operator: guards, gradient, fake tensors, torch.compile.

What a runtime installs is one function::

    o, lse = dsa_attention(q_nope, q_rope, latent, k_rope, indices, gate, scale=scale)

with ``q_nope [T, H, 512]`` the query times its head's part of the key up-projection (absorbed), ``q_rope [T, H, 64]``
rotated, ``latent [S, 512]`` the normed key-value latent, ``k_rope [S, 64]`` rotated (both ``None`` where nothing is
rotated), ``indices [T, K]`` int32 from the indexer (-1 where fewer keys exist), ``gate`` optional, ``[T, H]`` or
``[T, H, 512]`` before its sigmoid. ``o [T, H, 512]`` then goes through each head's value up-projection; ``lse [T, H]``
is what the indexer's loss needs. Batches are packed: T counts all tokens, indices are rows of the packed keys. The same
meaning in plain torch, same arguments: ``reference.dsa_attention_reference``. ``sparse_gqa_attention`` is the same over
key heads with values of their own.

Precision: scores, shares and sums in fp32; shares and dS rounded once to the inputs' dtype for the matrix products;
gradients of keys summed in fp32 over all queries, then rounded once (in fixed order each query's part is rounded too).

Times of one H200, 64 heads, K 2048, T 8192 / 32768, bf16: forward 4.6 / 20.8 ms, with what a backward needs 4.8,
backward 16.1 / 84.8; in fixed order 31.3 at 8192 (1.94 times); a gate of each value adds 0.2 forward and 0.3
backward; the check of the selection 0.76. What bounds them: ``hopper``, ``hopper_backward``.

Legend: T queries, S keys, H query heads, G key heads, D, V widths of query and value, K entries, B keys of an entry.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.dsa.attention import hopper_launch
from shardwright.kernels.dsa.attention.compute import SparseAttention, compute_forward
from shardwright.kernels.dsa.attention.problem import Problem
from shardwright.kernels.dsa.attention.registered import dsa_attention_forward


def attend(p: Problem, deterministic: bool | None, check_indices: bool) -> tuple[Tensor, Tensor]:
    """Both front doors end here: static guards, then the short or the registered way."""
    p.check_static()
    fixed = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    parts = (p.qn, p.qr, p.kn, p.kr, p.v, p.gate, p.sinks)
    given = [part for part in parts if part is not None]
    rest = (p.indices, p.bounds, p.scale, p.block, fixed, check_indices)
    if not direct(*given, p.indices):
        y, lse, _, _ = dsa_attention_forward(*parts, *rest, wants_gradient(*given))
        return y, lse
    if not wants_gradient(*given):
        found = compute_forward(p, False, check_indices)
        return found.y, found.lse
    return cast(tuple[Tensor, Tensor], SparseAttention.apply(*parts, *rest))


def dsa_attention(
    q_nope: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    indices: Tensor,
    gate: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    block_size: int = 1,
    bounds: Tensor | None = None,
    deterministic: bool | None = None,
    check_indices: bool = True,
) -> tuple[Tensor, Tensor]:
    """Multi-head latent attention in its absorbed form over each query's selected keys.

    Args:
        q_nope: ``[T, H, V]``, V at most 512; bf16, fp16 or fp32 like all others. Queries and keys may be views whose
            last dim is dense and whose rows start on 16-byte boundaries.
        q_rope: ``[T, H, R]``; ``None``, with ``k_rope``, where the layer rotates nothing.
        latent: ``[S, V]``, key and value.
        k_rope: ``[S, R]``.
        indices: ``[T, K]`` int32, each key (block) at most once in a row, -1 anywhere for nothing.
        gate: ``[T, H, V]`` or ``[T, H]``: the output is multiplied by its sigmoid. Must be dense.
        sinks: ``[H]`` logits of an entry without value; lse counts it.
        scale: of the scores, usually ``(128 + 64) ** -0.5``.
        block_size: keys of an entry; 1 for the indexer's top-k.
        bounds: ``[T, 2]`` int32: first key that a query may see and the one past its last (``visibility.bounds_of``).
            Needed where entries are blocks, which reach past a query's own position or document.
        deterministic: gradients of keys by ordered sums in place of fp32 atomics; torch's own switch where ``None``.
        check_indices: look for bad entries (``selection``); a caller whose indexer cannot make any may leave it out.

    Returns:
        o ``[T, H, V]``; lse ``[T, H]`` fp32 natural, without gradient. A query without a key: o = 0, lse = -inf or
        its sink.

    Raises:
        KernelError: an input outside ``contract``, or what ``selection`` finds.
    """
    if q_rope is None and k_rope is None:
        q_rope, k_rope = hopper_launch.rotated_zeros(q_nope, latent)
    p = Problem(
        q_nope,
        q_rope,
        _headed(latent),
        None if k_rope is None else _headed(k_rope),
        None,
        _rowed(indices),
        bounds,
        gate,
        sinks,
        scale,
        block_size,
    )
    return attend(p, deterministic, check_indices)


def sparse_gqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    gate: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    block_size: int = 1,
    bounds: Tensor | None = None,
    deterministic: bool | None = None,
    check_indices: bool = True,
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention over selected keys, a selection for each key head.

    Args:
        q: ``[T, H, D]``; head h reads key head ``h // (H / G)``.
        k: ``[S, G, D]``.
        v: ``[S, G, V]``.
        indices: ``[T, G, K]`` int32.
        gate, sinks, scale, block_size, bounds, deterministic, check_indices: as for ``dsa_attention``.

    Returns:
        o ``[T, H, V]`` and lse ``[T, H]``.

    Raises:
        KernelError: as ``dsa_attention``.
    """
    p = Problem(q, None, k, None, v, indices, bounds, gate, sinks, scale, block_size)
    return attend(p, deterministic, check_indices)


def _headed(keys: Tensor) -> Tensor:
    """``[S, width]`` with its one key head; another rank is left for the guards."""
    return keys[:, None] if keys.dim() == 2 else keys.reshape(*keys.shape[:1], -1) if keys.dim() < 2 else keys


def _rowed(indices: Tensor) -> Tensor:
    return indices[:, None] if indices.dim() == 2 else indices
