# mypy: disable-error-code="no-untyped-def"
"""Lightning indexer in Triton: scores of a chunk of queries, and the exact best keys of each row of scores.

Scoring keeps keys on the M side of the matrix units, so that the sum over heads stays inside a thread; a program
owns a tile of keys and walks over queries, whose head weights are fetched one query ahead. Choosing holds a row in
registers and seeks its k-th value: interpolation and bisection on the values' order as integers, until exactly k
pass or two neighbouring values enclose the k-th. Nothing is random and nothing is added across programs: the same
input gives the same bits.

Legend: T queries, S keys, N indexer heads, D head width, k chosen keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

HIGHEST = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-0x80000000)
VALUE_STEPS = tl.constexpr(24)
"""Steps that split by value; later ones halve the integers between, so 32 more end any search."""


@triton.jit(do_not_specialize=["first", "rows", "S", "query_start"])
def indexer_score_kernel(
    q_tiles,
    q_ptr,
    k_ptr,
    w_ptr,
    k_scale_ptr,
    starts_ptr,
    scores_ptr,
    first,
    rows,
    S,
    stride,
    query_start,
    scale,
    SKIP: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILES: tl.constexpr,
    PACKED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """``scores[t - first, s] = scale · Σ_h w[t, h] · max(q[t, h] · k[s], 0)`` for a tile of keys and of queries.

    A tile that no query of it needs is left unwritten: keys after all of them, before all their sequences
    (``PACKED``), or queries that all take every key because they see at most SKIP. ``TILES``: q comes through the
    tensor copy engine. ``SCALED``: keys carry a scale each (fp8). NaN passes through the ReLU as in torch.
    """
    at_key = tl.program_id(0) * KEYS
    at_row = tl.program_id(1) * QUERIES
    count = tl.minimum(rows - at_row, QUERIES)
    last_end = query_start + first + at_row + count
    needed = (at_key < last_end) & (last_end > SKIP)
    if PACKED:
        lanes = tl.arange(0, QUERIES)
        all_t = first + at_row + tl.minimum(lanes, count - 1)
        starts = tl.load(starts_ptr + all_t)
        longest = tl.max(query_start + all_t + 1 - starts, 0)
        needed = needed & (at_key + KEYS > tl.min(starts, 0)) & (longest > SKIP)
    if needed:
        key = at_key + tl.arange(0, KEYS)
        d = tl.arange(0, D)
        head = tl.arange(0, HEADS)
        real = head < N
        k = tl.load(k_ptr + tl.cast(key, tl.int64)[:, None] * D + d[None, :], mask=(key < S)[:, None], other=0.0)
        t0 = tl.cast(first + at_row, tl.int64)
        w = tl.load(w_ptr + t0 * N + head, mask=real, other=0.0).to(tl.float32) * scale
        at = scores_ptr + tl.cast(at_row, tl.int64) * stride + key
        if SCALED:
            k_scale = tl.load(k_scale_ptr + key, mask=key < S, other=0.0)
        for step in tl.range(0, count):
            t = t0 + step
            if TILES:
                q = q_tiles.load([(first + at_row + step) * N, 0])
            else:
                q = tl.load(q_ptr + (t * N + head)[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
            dots = tl.dot(k, q.T)
            ahead = t0 + tl.minimum(step + 1, count - 1)
            w_ahead = tl.load(w_ptr + ahead * N + head, mask=real, other=0.0).to(tl.float32) * scale
            part = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
            if N < HEADS:
                part = tl.where(real[None, :], part, 0.0)
            total = tl.sum(part, 1)
            if SCALED:
                total = total * k_scale
            tl.store(at, total)
            at += stride
            w = w_ahead


@triton.jit
def order_of(x):
    """fp32 → int32 whose order is that of the values; -0.0 as 0.0, NaN above all."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, HIGHEST, key)


@triton.jit
def value_of(key):
    """The fp32 value of an order."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def between(low, high, above_low, above_high, K, step):
    """Where to split next, strictly between two orders; ``low`` itself where they are neighbours.

    By value where the values give a usable split: in proportion to the counts, every third time in the middle.
    """
    half = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
    share = (above_low - K).to(tl.float32) / (above_low - above_high).to(tl.float32)
    share = tl.where(step % 3 == 2, 0.5, share)
    a, b = value_of(low), value_of(high)
    guess = order_of(a + (b - a) * share)
    usable = (guess > low) & (guess < high) & (step < VALUE_STEPS)
    return tl.where(usable, guess, half)


@triton.jit
def keys_of(scores, at_column, skip, n, BLOCK: tl.constexpr):
    """Orders of one piece of a row; below everything before its first score and where it has ended.

    ``scores`` is aligned: the row's own scores are its columns ``skip .. skip + n``.
    """
    column = at_column + tl.arange(0, BLOCK)
    inside = (column >= skip) & (column < skip + n)
    x = tl.load(scores + column, mask=column < (skip + n + 3) // 4 * 4, other=0.0)
    return tl.where(inside, order_of(x), LOWEST)


@triton.jit
def count_above(scores, skip, n, pivot, BLOCK: tl.constexpr):
    """How many of a row's orders are at least ``pivot``."""
    found = tl.zeros([BLOCK], dtype=tl.int32)
    for at_column in tl.range(0, skip + n, BLOCK):
        found += (keys_of(scores, at_column, skip, n, BLOCK) >= pivot).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def store_chosen(out, key, column, low, high, missing, over_before, tied_before):
    """Store the columns whose order is over ``low``, and the first ``missing`` of those that tie with it.

    Returns how many were over and tied so far.
    """
    over = (key >= high) & (high > low)
    tied = (key >= low) & ~over
    both = tied.to(tl.int32) + (over.to(tl.int32) << 16)
    ranks = tl.cumsum(both, 0)
    tied_rank = tied_before + (ranks & 0xFFFF)
    at = over_before + (ranks >> 16) + tl.minimum(tied_rank, missing) - 1
    tl.store(out + at, column, mask=over | (tied & (tied_rank <= missing)))
    sums = tl.sum(both, 0)
    return over_before + (sums >> 16), tied_before + (sums & 0xFFFF)


@triton.jit(do_not_specialize=["first", "query_start"])
def indexer_select_kernel(
    scores_ptr,
    starts_ptr,
    indices_ptr,
    flags_ptr,
    first,
    stride,
    query_start,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The K best keys of one query: ascending, the smaller key among equals, -1 where there are fewer keys.

    The row stays in registers while its threshold is sought (``COLUMNS`` > 0), or is read in pieces each time it is
    counted. The choice is written in pieces. ``flags[0]`` counts rows that met a NaN.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    t = first + row
    end = (query_start + t + 1).to(tl.int32)
    start = tl.cast(0, tl.int32)
    if PACKED:
        start = tl.load(starts_ptr + t).to(tl.int32)
    n = end - start
    out = indices_ptr + t * K
    if n <= K:
        slot = tl.arange(0, SLOTS)
        tl.store(out + slot, tl.where(slot < n, start + slot, -1), mask=slot < K)
    else:
        base = start // 4 * 4
        skip = start - base
        scores = scores_ptr + row * stride + base
        if COLUMNS > 0:
            key = keys_of(scores, 0, skip, n, COLUMNS)
            high = tl.max(key, 0)
            low = tl.min(tl.where(key == LOWEST, HIGHEST, key), 0)
            above_high = tl.sum((key >= high).to(tl.int32), 0)
        else:
            most = tl.full([PIECE], LOWEST, dtype=tl.int32)
            least = tl.full([PIECE], HIGHEST, dtype=tl.int32)
            for at_column in tl.range(0, skip + n, PIECE):
                piece = keys_of(scores, at_column, skip, n, PIECE)
                most = tl.maximum(most, piece)
                least = tl.minimum(least, tl.where(piece == LOWEST, HIGHEST, piece))
            high = tl.max(most, 0)
            low = tl.min(least, 0)
            above_high = count_above(scores, skip, n, high, PIECE)
        if high == HIGHEST:
            tl.atomic_add(flags_ptr, 1)
        above_low = n
        if above_high >= K:
            low = high
            above_low = tl.cast(K, tl.int32)
        step = 0
        while above_low != K:
            middle = between(low, high, above_low, above_high, K, step)
            if middle == low:
                above_low = tl.cast(K, tl.int32)
            else:
                if COLUMNS > 0:
                    above = tl.sum((key >= middle).to(tl.int32), 0)
                else:
                    above = count_above(scores, skip, n, middle, PIECE)
                if above >= K:
                    low = middle
                    above_low = above
                else:
                    high = middle
                    above_high = above
            step += 1
        missing = K - tl.where(high > low, above_high, 0)
        lane = tl.arange(0, PIECE)
        if COLUMNS == PIECE:
            store_chosen(out, key, base + lane, low, high, missing, 0, 0)
        else:
            over, tied = 0, 0
            for at_column in tl.range(0, skip + n, PIECE):
                piece = keys_of(scores, at_column, skip, n, PIECE)
                over, tied = store_chosen(out, piece, base + at_column + lane, low, high, missing, over, tied)
