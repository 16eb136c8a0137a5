# mypy: disable-error-code="no-untyped-def"
"""The indexer's loss in Triton: the attention's target, the loss of a row, and the gradient of its scores in place.

A program owns one query. Sums over heads and over keys are made in one program: the same bits in every run.

Legend: T queries, S keys, H attention heads, G key heads, M = DA + DB attention width, k chosen keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.dsa.indexer.gradient import chosen_keys

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["first", "S", "query_start"])
def dsa_kl_target_kernel(
    q_ptr,
    k_ptr,
    lse_ptr,
    indices_ptr,
    starts_ptr,
    target_ptr,
    first,
    S,
    stride,
    query_start,
    scale,
    K: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    KEYS: tl.constexpr,
    CHOSEN: tl.constexpr,
    PACKED: tl.constexpr,
):
    """``target[t - first, j] = Σ_h exp(scale · q[t, h] · k - lse[t, h])`` at the j-th chosen key, or at key j.

    Heads that do not fit one tile are added part after part, in order, to what the program itself stored.
    """
    M: tl.constexpr = DA + DB
    EACH: tl.constexpr = H // G
    row = tl.cast(tl.program_id(0), tl.int64)
    t = first + row
    lane = tl.arange(0, KEYS)
    a = tl.arange(0, DA)
    begin = tl.cast(0, tl.int32)
    limit = tl.cast(K, tl.int32)
    if not CHOSEN:
        limit = (query_start + t + 1).to(tl.int32)
        if PACKED:
            begin = tl.load(starts_ptr + t).to(tl.int32)
    for part in tl.range(0, G * PARTS, num_stages=1):
        group = part // PARTS
        inner = (part % PARTS) * HEADS + tl.arange(0, HEADS)
        live = inner < EACH
        head = t * H + group * EACH + inner
        q = tl.load(q_ptr + head[:, None] * M + a[None, :], mask=live[:, None], other=0.0)
        if DB > 0:
            b = DA + tl.arange(0, DB)
            q_rest = tl.load(q_ptr + head[:, None] * M + b[None, :], mask=live[:, None], other=0.0)
        lse = tl.load(lse_ptr + head, mask=live, other=0.0)
        for j in tl.range(begin, limit, KEYS):
            column = j + lane
            if CHOSEN:
                key, real, _ = chosen_keys(indices_ptr, t * K, column, K, S)
            else:
                real = column < limit
                key = tl.where(real, column, 0).to(tl.int64)
            base = (key * G + group) * M
            k = tl.load(k_ptr + base[:, None] + a[None, :], mask=real[:, None], other=0.0)
            logits = tl.dot(q, k.T)
            if DB > 0:
                k_rest = tl.load(k_ptr + base[:, None] + b[None, :], mask=real[:, None], other=0.0)
                logits = tl.dot(q_rest, k_rest.T, logits)
            share = tl.exp2((logits * scale - lse[:, None]) * LOG2_E)
            mass = tl.where(real, tl.sum(tl.where(live[:, None], share, 0.0), 0), 0.0)
            at = target_ptr + row * stride + column
            if G * PARTS > 1:
                mass += tl.load(at, mask=(column < limit) & (part > 0), other=0.0)
            tl.store(at, mass, mask=column < limit)
        if G * PARTS > 1:
            tl.debug_barrier()


@triton.jit(do_not_specialize=["first", "query_start"])
def dsa_kl_row_kernel(
    scores_ptr,
    target_ptr,
    starts_ptr,
    loss_ptr,
    flags_ptr,
    first,
    stride,
    query_start,
    factor,
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    PACKED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``loss[t] = KL(p ‖ softmax(scores))`` with p the target over its own sum; scores become their gradient.

    The gradient is ``factor · (softmax - p)``, and 0 in the few columns before and behind the row's own. A row without
    mass has loss 0 and gradient 0. ``flags[0]`` counts rows whose loss is NaN.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    t = first + row
    lane = tl.arange(0, BLOCK)
    begin = tl.cast(0, tl.int32)
    limit = tl.cast(K, tl.int32)
    bound = limit
    if not CHOSEN:
        limit = (query_start + t + 1).to(tl.int32)
        bound = (limit + 3) // 4 * 4
        if PACKED:
            begin = tl.load(starts_ptr + t).to(tl.int32)
    scores = scores_ptr + row * stride
    target = target_ptr + row * stride
    top = tl.cast(float("-inf"), tl.float32)
    total = tl.cast(0.0, tl.float32)
    mass = tl.cast(0.0, tl.float32)
    for j in tl.range(begin // 4 * 4, limit, BLOCK):
        column = j + lane
        inside = (column >= begin) & (column < limit)
        x = tl.where(inside, tl.load(scores + column, mask=column < bound, other=0.0), float("-inf"))
        p = tl.where(inside, tl.load(target + column, mask=column < bound, other=0.0), 0.0)
        higher = tl.maximum(top, tl.max(x, 0))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2((top - safe) * LOG2_E) + tl.sum(tl.exp2((x - safe) * LOG2_E), 0)
        top = higher
        mass += tl.sum(p, 0)
    normaliser = tl.where(total == 0.0, 0.0, top + tl.log(total))
    some = mass != 0.0
    share = tl.where(some, 1.0 / mass, 0.0)
    loss = tl.cast(0.0, tl.float32)
    for j in tl.range(begin // 4 * 4, limit, BLOCK):
        column = j + lane
        inside = (column >= begin) & (column < limit)
        x = tl.where(inside, tl.load(scores + column, mask=column < bound, other=0.0), float("-inf")) - normaliser
        p = tl.where(inside, tl.load(target + column, mask=column < bound, other=0.0), 0.0) * share
        held = p != 0.0
        loss += tl.sum(tl.where(held, p * (tl.log(tl.where(held, p, 1.0)) - tl.where(held, x, 0.0)), 0.0), 0)
        if GRADIENT:
            g = tl.where(some, tl.exp2(x * LOG2_E) - p, 0.0) * factor
            tl.store(scores + column, g, mask=column < bound)
    tl.store(loss_ptr + t, loss)
    if loss != loss:
        tl.atomic_add(flags_ptr, 1)


@triton.jit
def dsa_kl_scale_kernel(x_ptr, scale_ptr, y_ptr, n, power, BLOCK: tl.constexpr):
    """``y = x · scale · power`` in fp32, one rounding; ``scale`` is one fp32 value on the device."""
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = x * (tl.load(scale_ptr) * power)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
