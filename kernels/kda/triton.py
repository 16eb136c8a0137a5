# mypy: disable-error-code="no-untyped-def"
"""What KDA's kernels share; running sums of decays; the state from chunk to chunk with the output.

Decays are kept in log2 units. A chunk has C = 64 tokens; ``total`` is the running sum of log-decays inside it, made
once by ``kda_gate_kernel`` and read again where it is needed: a row of it costs one load, and nothing has to be kept.
What is inside a chunk before its state is known is in ``chunk_triton``.

Levels (the keys kernel's way through the pairs (i, j) of a chunk): at level s the chunk is cut into nodes of 2s tokens,
and pairs whose row lies in a node's right half and whose column lies in its left half are one product of two factors.
Both are taken relative to the running sum at the last token of the left half, so that every exponent is at most 0
whatever the gate does, and that token lies in the past of every row. With a gate of at least -5 a token, levels stop at
blocks of 16 tokens: there one factor may grow, to 2 ** 58 at most.

Workspaces are whole tiles ``[chunk, value head, C, width]``; rows past a document's end are zero there.

Legend: C tokens of a chunk, NT chunks, H key heads, HV value heads, G = HV / H, K key width, V value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NORM_EPS = tl.constexpr(1e-6)
HALF_SPAN = tl.constexpr(57.70780163555854)
"""Half of the largest span of a block of 16 tokens at -5 a token, in log2 units."""
GIVEN = tl.constexpr(0)
BOUNDED = tl.constexpr(1)
SOFTPLUS = tl.constexpr(2)


@triton.jit
def log2_decay(raw, bias, speed, lower, GATE: tl.constexpr):
    """Log2-decay of a raw gate, fp32."""
    if GATE == GIVEN:
        return raw * LOG2E
    elif GATE == BOUNDED:
        return (lower * LOG2E) * tl.sigmoid(speed * (raw + bias))
    else:
        z = raw + bias
        e = tl.exp2(-tl.abs(z) * LOG2E)
        small = e * (LOG2E - e * (0.5 * LOG2E))
        return -speed * (tl.maximum(z, 0.0) * LOG2E + tl.where(e < 1e-3, small, tl.log2(1.0 + e)))


@triton.jit
def load_rows(ptr, tokens, valid, head, heads, cols, WIDTH: tl.constexpr):
    """``[C, cols]`` of a tensor ``[tokens, heads, WIDTH]``, fp32; 0 for rows past the end."""
    at = (tokens[:, None] * heads + head) * WIDTH + cols[None, :]
    return tl.load(ptr + at, mask=valid[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_beta(beta_ptr, tokens, valid, hv, HV, SIGMOID: tl.constexpr):
    """Write strengths ``[C]``, fp32; 0 for rows past the end.

    A strength of 0 that is given becomes 1e-20, which no sum can tell from 0: its gradient is a quotient by it.
    """
    beta = tl.load(beta_ptr + tokens * HV + hv, mask=valid, other=0.0).to(tl.float32)
    if SIGMOID:
        beta = tl.sigmoid(beta)
    else:
        beta = tl.where(tl.abs(beta) < 1e-20, 1e-20, beta)
    return tl.where(valid, beta, 0.0)


@triton.jit
def pair_mask(level, levels, BLOCKED: tl.constexpr, C: tl.constexpr):
    """Pairs of a level ``[C, C]``, on both sides of the diagonal: those whose tokens differ first in bit 5 - level;
    last, where blocks are allowed, those inside one block of 16 tokens."""
    shift = 5 - level
    same = 1
    if BLOCKED:
        shift = tl.where(level < levels - 1, shift, 4)
        same = tl.where(level < levels - 1, 1, 0)
    i = tl.arange(0, C)
    return ((i[:, None] ^ i[None, :]) >> shift) == same


@triton.jit
def factors(total_ptr, tile, level, cols, K: tl.constexpr, levels, BLOCKED: tl.constexpr,
            C: tl.constexpr):  # fmt: skip
    """Factors of rows and of columns at a level, ``[C, cols]``: ``exp2`` of the span to the level's origin.

    The origin is the last token of the left half, or the token before a block of the diagonal. Without blocks rows lie
    in right halves and columns in left ones, so that one factor serves both.
    """
    rows = tl.arange(0, C)
    origin = (rows >> (6 - level) << (6 - level)) + (32 >> level) - 1
    base = total_ptr + tile * C * K + cols[None, :]
    if BLOCKED:
        last = level == levels - 1
        origin = tl.where(last, (rows >> 4 << 4) - 1, origin)
        shift = tl.where(last, HALF_SPAN, 0.0)
        most = tl.where(last, 4.0 * HALF_SPAN, 0.0)
        start = tl.load(base + origin[:, None] * K, mask=origin[:, None] >= 0, other=0.0)
        span = tl.load(base + rows[:, None] * K) - start
        above = tl.exp2(tl.minimum(span, 0.0) + shift)
        below = tl.exp2(tl.minimum(-span, most) - shift)
    else:
        span = tl.load(base + rows[:, None] * K) - tl.load(base + origin[:, None] * K)
        above = tl.exp2(-tl.abs(span))
        below = above
    return above, below


@triton.jit
def chunk_decay(total_ptr, tile, keys, K: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr):
    """Decay over a whole chunk: ``[K, 1]`` of every key channel, or one number where a head has one gate."""
    if CHANNELS:
        return tl.exp2(tl.load(total_ptr + (tile * C + C - 1) * K + keys))[:, None]
    else:
        return tl.exp2(tl.load(total_ptr + tile * C + C - 1))


@triton.jit
def kda_gate_kernel(
    g_ptr, a_log_ptr, bias_ptr, table_ptr, total_ptr, lower, HV,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Running sums of log2-decays inside one chunk of one value head: ``total [.., C, K]`` in fp32."""
    kb = tl.program_id(0)
    hv = tl.program_id(1)
    chunk = tl.program_id(2).to(tl.int64)
    start = tl.load(table_ptr + 2 * chunk)
    end = tl.load(table_ptr + 2 * chunk + 1)
    rows = tl.arange(0, C)
    valid = start + rows < end
    tokens = (start + rows).to(tl.int64)
    cols = kb * BK + tl.arange(0, BK)
    raw = load_rows(g_ptr, tokens, valid, hv, HV, cols, K)
    bias = 0.0
    speed = 1.0
    if GATE != GIVEN:
        bias = tl.load(bias_ptr + hv * K + cols).to(tl.float32)[None, :]
        speed = tl.exp(tl.load(a_log_ptr + hv).to(tl.float32))
    decay = tl.where(valid[:, None], log2_decay(raw, bias, speed, lower, GATE), 0.0)
    at = ((chunk * HV + hv) * C + rows[:, None]) * K + cols[None, :]
    tl.store(total_ptr + at, tl.cumsum(decay, 0))


@triton.jit
def kda_scan_kernel(
    w_ptr, u_ptr, qe_ptr, ke_ptr, p_ptr, total_ptr, table_ptr, doc_ptr, initial_ptr, final_ptr, o_ptr, states_ptr, HV,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    WITH_INITIAL: tl.constexpr, WITH_FINAL: tl.constexpr, OUTPUT: tl.constexpr, STATES: tl.constexpr,
    CHANNELS: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One document, value head and block of value columns: the state from chunk to chunk, in fp32.

    OUTPUT writes ``o [tokens, HV, V]``. STATES writes the state before each chunk ``[.., K, V]`` in w's dtype and
    replaces u by the new values ``u - w S``.
    """
    vb = tl.program_id(0)
    hv = tl.program_id(1)
    doc = tl.program_id(2)
    first = tl.load(doc_ptr + doc)
    last = tl.load(doc_ptr + doc + 1)
    rows = tl.arange(0, C)
    keys = tl.arange(0, K)
    cols = vb * BV + tl.arange(0, BV)
    narrow = w_ptr.dtype.element_ty
    corner = (doc.to(tl.int64) * HV + hv) * K * V + keys[:, None] * V + cols[None, :]
    state = tl.zeros((K, BV), tl.float32)
    if WITH_INITIAL:
        state += tl.load(initial_ptr + corner).to(tl.float32)
    begin = tl.cast(first, tl.int64) * HV + hv
    w_ptr += begin * C * K
    u_ptr += begin * C * V
    qe_ptr += begin * C * K
    ke_ptr += begin * C * K
    p_ptr += begin * C * C
    total_ptr += begin * C * (K if CHANNELS else 1)
    states_ptr += begin * K * V
    at_keys = rows[:, None] * K + keys[None, :]
    at_values = rows[:, None] * V + cols[None, :]
    for chunk in tl.range(first, last, num_stages=STAGES):
        tile = (chunk - first).to(tl.int64) * HV
        w = tl.load(w_ptr + tile * (C * K) + at_keys)
        ke = tl.load(ke_ptr + tile * (C * K) + at_keys)
        u = tl.load(u_ptr + tile * (C * V) + at_values)
        decay = chunk_decay(total_ptr, tile, keys, K, C, CHANNELS)
        rounded = state.to(narrow)
        new = (u - tl.dot(w, rounded, input_precision=PREC)).to(narrow)
        if OUTPUT:
            qe = tl.load(qe_ptr + tile * (C * K) + at_keys)
            p = tl.load(p_ptr + tile * (C * C) + rows[:, None] * C + rows[None, :])
            o = tl.dot(qe, rounded, input_precision=PREC)
            o = tl.dot(p, new, o, input_precision=PREC)
            start = tl.load(table_ptr + 2 * chunk)
            end = tl.load(table_ptr + 2 * chunk + 1)
            at = ((start + rows).to(tl.int64)[:, None] * HV + hv) * V + cols[None, :]
            tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=(start + rows < end)[:, None])
        state = tl.dot(tl.trans(ke), new, state * decay, input_precision=PREC)
        if STATES:
            tl.store(states_ptr + tile * (K * V) + keys[:, None] * V + cols[None, :], rounded)
            tl.store(u_ptr + tile * (C * V) + at_values, new)
    if WITH_FINAL:
        tl.store(final_ptr + corner, state)
