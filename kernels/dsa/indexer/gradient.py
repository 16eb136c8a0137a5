# mypy: disable-error-code="no-untyped-def"
"""Scores at chosen keys, and the gradient of scores (LIG), in Triton.

``indexer_gradient_kernel`` owns one query and walks over its keys, chosen ones (``CHOSEN``) or all it sees: dq and
dw stay in registers; dk of a key that many queries share is added in fp32 to memory (``SCATTER``), in no fixed
order. ``indexer_keys_gradient_kernel`` owns a tile of keys and walks over queries instead: no atomics, the same
bits in every run, for scores of all keys.

The gradient of a score is rounded once to the inputs' dtype, as a matrix operand; sums are fp32.

Legend: T queries, S keys, N indexer heads, D head width, k chosen keys.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chosen_keys(indices_ptr, base, column, K, S):
    """Keys at some columns of a row of indices, which of them are real, and how many are out of range."""
    key = tl.load(indices_ptr + base + column, mask=column < K, other=-1)
    real = (key >= 0) & (key < S)
    wrong = tl.sum(((key < -1) | (key >= S)).to(tl.int32), 0)
    return tl.where(real, key, 0).to(tl.int64), real, wrong


@triton.jit(do_not_specialize=["first", "S"])
def indexer_pairs_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    indices_ptr,
    scores_ptr,
    flags_ptr,
    first,
    S,
    scale,
    fill,
    K: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
):
    """``scores[t - first, j]`` of query t and its j-th chosen key; ``fill`` where the index is -1.

    ``flags[1]`` counts indices out of range.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    t = first + row
    head = tl.arange(0, HEADS)
    d = tl.arange(0, D)
    lane = tl.arange(0, KEYS)
    live = head < N
    q = tl.load(q_ptr + (t * N + head)[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    w = tl.load(w_ptr + t * N + head, mask=live, other=0.0).to(tl.float32) * scale
    outside = 0
    for j in tl.range(0, K, KEYS):
        key, real, wrong = chosen_keys(indices_ptr, t * K, j + lane, K, S)
        outside += wrong
        k = tl.load(k_ptr + key[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
        dots = tl.dot(q, k.T)
        part = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[:, None]
        score = tl.where(real, tl.sum(part, 0), fill)
        tl.store(scores_ptr + row * K + j + lane, score, mask=j + lane < K)
    if outside > 0:
        tl.atomic_add(flags_ptr + 1, outside)


@triton.jit(do_not_specialize=["first", "S", "query_start"])
def indexer_gradient_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    indices_ptr,
    starts_ptr,
    g_ptr,
    dq_ptr,
    dk_ptr,
    dw_ptr,
    flags_ptr,
    first,
    S,
    stride,
    query_start,
    scale,
    K: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    CHOSEN: tl.constexpr,
    PACKED: tl.constexpr,
    SCATTER: tl.constexpr,
):
    """dq, dw of one query, and its part of dk, for the gradient ``g`` of its scores.

    ``g[t - first, j]`` belongs to the j-th chosen key, or to key j itself where not ``CHOSEN``.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    t = first + row
    head = tl.arange(0, HEADS)
    d = tl.arange(0, D)
    lane = tl.arange(0, KEYS)
    live = head < N
    q = tl.load(q_ptr + (t * N + head)[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    w = tl.load(w_ptr + t * N + head, mask=live, other=0.0).to(tl.float32) * scale
    dq = tl.zeros([HEADS, D], dtype=tl.float32)
    dw = tl.zeros([HEADS], dtype=tl.float32)
    begin = tl.cast(0, tl.int32)
    limit = tl.cast(K, tl.int32)
    if not CHOSEN:
        limit = (query_start + t + 1).to(tl.int32)
        if PACKED:
            begin = tl.load(starts_ptr + t).to(tl.int32)
    outside = 0
    for j in tl.range(begin, limit, KEYS):
        column = j + lane
        if CHOSEN:
            key, real, wrong = chosen_keys(indices_ptr, t * K, column, K, S)
            outside += wrong
        else:
            real = column < limit
            key = tl.where(real, column, 0).to(tl.int64)
        k = tl.load(k_ptr + key[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
        g = tl.load(g_ptr + row * stride + column, mask=real, other=0.0)
        dots = tl.dot(q, k.T)
        dw += tl.sum(tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * g[None, :], 1)
        ds = tl.where(dots <= 0.0, 0.0, w[:, None] * g[None, :]).to(k.dtype)
        dq = tl.dot(ds, k, dq)
        if SCATTER:
            part = tl.dot(ds.T, q)
            tl.atomic_add(dk_ptr + key[:, None] * D + d[None, :], part, mask=real[:, None], sem="relaxed")
    tl.store(dq_ptr + (t * N + head)[:, None] * D + d[None, :], dq.to(dq_ptr.dtype.element_ty), mask=live[:, None])
    tl.store(dw_ptr + t * N + head, (dw * scale).to(dw_ptr.dtype.element_ty), mask=live)
    if CHOSEN and outside > 0:
        tl.atomic_add(flags_ptr + 1, outside)


@triton.jit(do_not_specialize=["first", "rows", "S", "query_start", "part_rows"])
def indexer_keys_gradient_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    starts_ptr,
    g_ptr,
    part_ptr,
    first,
    rows,
    S,
    stride,
    query_start,
    part_rows,
    scale,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Add to ``part[split, s]`` the gradient of key s from one part of a chunk's queries, for all scores.

    A program owns a tile of keys of one part; chunks follow each other on one stream, so the order is fixed.
    """
    at_key = tl.program_id(0) * KEYS
    split = tl.program_id(1)
    key = at_key + tl.arange(0, KEYS)
    d = tl.arange(0, D)
    head = tl.arange(0, HEADS)
    live = head < N
    inside = (key < S)[:, None]
    begin = tl.maximum(split * part_rows, at_key - query_start - first)
    limit = tl.minimum((split + 1) * part_rows, rows)
    if begin < limit:
        where = part_ptr + (tl.cast(split, tl.int64) * S + key)[:, None] * D + d[None, :]
        k = tl.load(k_ptr + tl.cast(key, tl.int64)[:, None] * D + d[None, :], mask=inside, other=0.0)
        dk = tl.load(where, mask=inside, other=0.0)
        for row in tl.range(begin, limit):
            t = tl.cast(first, tl.int64) + row
            q = tl.load(q_ptr + (t * N + head)[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
            w = tl.load(w_ptr + t * N + head, mask=live, other=0.0).to(tl.float32) * scale
            seen = key <= query_start + t
            if PACKED:
                seen = seen & (key >= tl.load(starts_ptr + t))
            g = tl.load(g_ptr + tl.cast(row, tl.int64) * stride + key, mask=seen, other=0.0)
            dots = tl.dot(k, q.T)
            ds = tl.where(dots <= 0.0, 0.0, g[:, None] * w[None, :]).to(q.dtype)
            dk = tl.dot(ds, q, dk)
        tl.store(where, dk, mask=inside)
