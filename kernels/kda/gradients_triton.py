# mypy: disable-error-code="no-untyped-def"
"""Backward kernels of KDA: the state's gradient from chunk to chunk, then every input's gradient inside a chunk.

What a chunk computes (``S`` the state before it, ``X = (I + A)⁻¹``, all else as in ``triton.py``)::

    u = X β v      w = X β eᵗ k      new = u - w S      o = qe S + P new      S⁺ = d S + keᵀ new

Backward, with ``dS⁺`` from the chunk after it::

    dnew = Pᵀ do + ke dS⁺      dS = d dS⁺ + qeᵀ do - wᵀ dnew
    x = Xᵀ dnew      dv = β x      d(β eᵗ k) = -x Sᵀ      dA = -x newᵀ      dP = do newᵀ

The gradient of A needs no product with two inverses: ``-Xᵀ dX Xᵀ`` is ``-x (u - w S)ᵀ``. Nor does that of w need
one: the values kernel leaves x where dnew was. Two sums over the whole
key width follow from values alone, so that blocks of key channels are independent of each other::

    q · dq = o · do      k · dk = 2 x · new - v · dv

(the last because scaling k by c is scaling beta by c² and v by 1/c, and ``beta dbeta = x · new``).

Rounding to 16 bits is kept out of where it would weigh most. What dnew loses by it is stored beside it: x and dv are
almost the whole of dnew where decays are strong. A token's pair with itself, the largest of P, is not a pair of
rounded factors: its gradient ``do · new`` goes to the keys kernel in fp32, and cancels in that of the gate. dA is
kept in two parts, since the gradient of a gate's speed adds up what all pairs of a head have lost. And dbeta is summed
from products with the exact v and k, over values here and over key channels in the keys kernels::

    dbeta = x · v + k · d(beta k) = x · v + Σ_K k (-e x Sᵀ + the pairs' share)

The gradient of a decay sums over pairs that span its token; pairs that do not must cancel. So a pair enters the
gradient of the running sum at its row and at its column as the product of the same rounded factors: the two then
differ by the rounding of fp32 sums only.

Where every channel has a gate, u, w and new are kept times their key's factor 1/norm, dnew without it, and ke and
the columns of P without it too: products of these are the same, and the values and keys kernels put it right.

Legend: C tokens of a chunk, H key heads, HV value heads, G = HV / H, K key width, V value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.kda.triton import (
    BOUNDED,
    GIVEN,
    LOG2E,
    chunk_decay,
    factors,
    load_beta,
    load_rows,
    log2_decay,
    pair_mask,
)


@triton.jit
def kda_reverse_kernel(
    do_ptr, w_ptr, qe_ptr, ke_ptr, p_ptr, total_ptr, table_ptr, doc_ptr, dfinal_ptr, dinitial_ptr, dstates_ptr,
    dnew_ptr, rest_ptr, HV,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    WITH_FINAL: tl.constexpr, WITH_INITIAL: tl.constexpr, CHUNKS: tl.constexpr, CHANNELS: tl.constexpr,
    PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One document, value head and block of value columns, from its last chunk to its first.

    With CHUNKS writes the gradient of the state after each chunk ``[.., K, V]`` and of the new values ``[.., C, V]``,
    both in w's dtype, and what the latter lose by it as ``rest [tokens, HV, V]``; with WITH_INITIAL the gradient of the
    initial state in fp32. Loaded tiles go into products as they are, so that they can be copied ahead: it is dnew that
    changes its sign, not w.
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
    dstate = tl.zeros((K, BV), tl.float32)
    if WITH_FINAL:
        dstate += tl.load(dfinal_ptr + corner).to(tl.float32)
    for step in tl.range(0, last - first, num_stages=STAGES):
        chunk = last - 1 - step
        tile = tl.cast(chunk, tl.int64) * HV + hv
        wide = (tile * C + rows[:, None]) * K + keys[None, :]
        ke = tl.load(ke_ptr + wide)
        p = tl.load(p_ptr + tile * C * C + rows[:, None] * C + rows[None, :])
        start = tl.load(table_ptr + 2 * chunk)
        end = tl.load(table_ptr + 2 * chunk + 1)
        at = ((start + rows).to(tl.int64)[:, None] * HV + hv) * V + cols[None, :]
        do = tl.load(do_ptr + at, mask=(start + rows < end)[:, None], other=0.0)
        decay = chunk_decay(total_ptr, tile, keys, K, C, CHANNELS)
        qe = tl.load(qe_ptr + wide)
        w = tl.load(w_ptr + wide)
        rounded = dstate.to(narrow)
        if CHUNKS:
            tl.store(dstates_ptr + (tile * K + keys[:, None]) * V + cols[None, :], rounded)
        dnew = tl.dot(tl.trans(p), do, input_precision=PREC)
        dnew = tl.dot(ke, rounded, dnew, input_precision=PREC)
        dstate = tl.dot(tl.trans(qe), do, dstate * decay, input_precision=PREC)
        dstate = tl.dot(tl.trans(w), (-dnew).to(narrow), dstate, input_precision=PREC)
        if CHUNKS:
            kept = dnew.to(narrow)
            tl.store(dnew_ptr + (tile * C + rows[:, None]) * V + cols[None, :], kept)
            lost = (dnew - kept.to(tl.float32)).to(narrow)
            tl.store(rest_ptr + at, lost, mask=(start + rows < end)[:, None])
    if WITH_INITIAL:
        tl.store(dinitial_ptr + corner, dstate)


@triton.jit
def kda_values_kernel(
    v_ptr, beta_ptr, table_ptr, o_ptr, do_ptr, inverse_ptr, norms_ptr, new_ptr, x_ptr,
    dv_ptr, dbeta_ptr, dp_ptr, da_ptr, along_ptr, shares_ptr, HV,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SIGMOID: tl.constexpr, SHARES: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: gradients of v, P and A, the values' of beta, the parts of dq and dk along q and k.

    Writes dv ``[tokens, HV, V]``, dp and da ``[.., C, C]`` in new's dtype with zeros outside their triangles. ``x``
    holds dnew when the kernel starts and ``x = Xᵀ dnew`` when it ends; ``dv`` holds what dnew lost by rounding.

    SHARES is how many parts a chunk's dbeta has. Then the first of ``shares [.., SHARES, C]``, ``x · v``, is written,
    and along ``[.., 3, C]``: ``o · do``, ``k · dk`` and the diagonal of dp, which dp leaves out; all in fp32. Rows of
    new and dnew have their key's factor 1/norm in the one and not in the other, and da is a pair ``[.., 2, C, C]``:
    itself, and what it lost by rounding. Where SHARES is 0, none of this is so: along has two rows, dp its diagonal,
    and dbeta ``[tokens, HV]`` is written whole.
    """
    hv = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    tile = chunk * HV + hv
    start = tl.load(table_ptr + 2 * chunk)
    end = tl.load(table_ptr + 2 * chunk + 1)
    rows = tl.arange(0, C)
    valid = start + rows < end
    tokens = (start + rows).to(tl.int64)
    narrow = new_ptr.dtype.element_ty
    i = rows[:, None]
    j = rows[None, :]
    beta = load_beta(beta_ptr, tokens, valid, hv, HV, SIGMOID)
    inverse_t = tl.load(inverse_ptr + tile * C * C + j * C + i)
    dp = tl.zeros((C, C), tl.float32)
    da = tl.zeros((C, C), tl.float32)
    v_along = tl.zeros((C,), tl.float32)
    o_along = tl.zeros((C,), tl.float32)
    if SHARES > 0:
        norm = tl.load(norms_ptr + tile * 2 * C + C + rows)
    else:
        norm = tl.full((C,), 1.0, tl.float32)
    for vb in range(V // BV):
        cols = vb * BV + tl.arange(0, BV)
        at = (tokens[:, None] * HV + hv) * V + cols[None, :]
        at_tile = (tile * C + i) * V + cols[None, :]
        do = tl.load(do_ptr + at, mask=valid[:, None], other=0.0)
        o = tl.load(o_ptr + at, mask=valid[:, None], other=0.0)
        o_along += tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        new = tl.load(new_ptr + at_tile)
        dp = tl.dot(do, tl.trans(new), dp, input_precision=PREC)
        dnew = tl.load(x_ptr + at_tile).to(tl.float32)
        dnew += tl.load(dv_ptr + at, mask=valid[:, None], other=0.0).to(tl.float32)
        dnew *= norm[:, None]
        rounded = dnew.to(narrow)
        x = tl.dot(inverse_t, rounded, input_precision=PREC)
        x = tl.dot(inverse_t, (dnew - rounded.to(tl.float32)).to(narrow), x, input_precision=PREC)
        v_along += tl.sum(load_rows(v_ptr, tokens, valid, hv, HV, cols, V) * x, 1)
        tl.store(dv_ptr + at, (x * beta[:, None]).to(dv_ptr.dtype.element_ty), mask=valid[:, None])
        rounded = x.to(narrow)
        tl.store(x_ptr + at_tile, rounded)
        da = tl.dot(-rounded, tl.trans(new), da, input_precision=PREC)
        da = tl.dot((rounded.to(tl.float32) - x).to(narrow), tl.trans(new), da, input_precision=PREC)
    dp /= norm[None, :]
    da /= norm[None, :]
    diagonal = tl.sum(tl.where(i == j, dp, 0.0), 1)
    new_along = -tl.sum(tl.where(i == j, da, 0.0), 1)
    da = tl.where(i > j, da, 0.0)
    rounded = da.to(narrow)
    square = tile * C * C + i * C + j
    if SHARES > 0:
        tl.store(dp_ptr + square, tl.where(i > j, dp, 0.0).to(narrow))
        tl.store(da_ptr + (square + tile * C * C), rounded)
        tl.store(da_ptr + (square + (tile + 1) * C * C), (da - rounded.to(tl.float32)).to(narrow))
    else:
        tl.store(dp_ptr + square, tl.where(i >= j, dp, 0.0).to(narrow))
        tl.store(da_ptr + square, rounded)
    along = along_ptr + tile * (2 if SHARES == 0 else 3) * C + rows
    tl.store(along, o_along)
    tl.store(along + C, 2.0 * new_along - beta * v_along)
    if SHARES > 0:
        tl.store(along + 2 * C, diagonal)
        tl.store(shares_ptr + tile * SHARES * C + rows, v_along)
    else:
        if SIGMOID:
            dbeta = new_along * (1.0 - beta)
        else:
            dbeta = tl.where(valid, new_along / tl.where(valid, beta, 1.0), 0.0)
        tl.store(dbeta_ptr + tokens * HV + hv, dbeta.to(dbeta_ptr.dtype.element_ty), mask=valid)


@triton.jit
def kda_strengths_kernel(
    shares_ptr, beta_ptr, table_ptr, dbeta_ptr, HV,
    SHARES: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One chunk of BH value heads: dbeta ``[tokens, HV]`` from its parts ``[.., SHARES, C]``, in their order."""
    heads = (tl.program_id(0) * BH + tl.arange(0, BH))[:, None]
    chunk = tl.program_id(1).to(tl.int64)
    start = tl.load(table_ptr + 2 * chunk)
    end = tl.load(table_ptr + 2 * chunk + 1)
    rows = tl.arange(0, C)[None, :]
    valid = (start + rows < end) & (heads < HV)
    at = (start + rows).to(tl.int64) * HV + heads
    shares_ptr += (chunk * HV + heads) * (SHARES * C) + rows
    dbeta = tl.load(shares_ptr, mask=heads < HV, other=0.0)
    for n in tl.static_range(1, SHARES):
        dbeta += tl.load(shares_ptr + n * C, mask=heads < HV, other=0.0)
    if SIGMOID:
        beta = tl.sigmoid(tl.load(beta_ptr + at, mask=valid, other=0.0).to(tl.float32))
        dbeta *= beta * (1.0 - beta)
    tl.store(dbeta_ptr + at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=valid)


@triton.jit
def kda_keys_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, a_log_ptr, bias_ptr, total_ptr, table_ptr, do_ptr,
    norms_ptr, new_ptr, x_ptr, states_ptr, dstates_ptr, dp_ptr, da_ptr, along_ptr, shares_ptr,
    dq_ptr, dk_ptr, dg_ptr, dspeed_ptr, dbias_ptr,
    lower, scale, HV, G, levels, zero,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, BLOCKED: tl.constexpr, SIGMOID: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One block of key channels of one chunk of one value head: gradients of q, k and the gate.

    Writes dq, dk, dg ``[tokens, HV, K]`` and, in fp32, this block's parts of the gradients of beta
    ``[chunk, HV, 1 + K / BK, C]``, whose first is the values', of A_log ``[chunk, HV, K / BK]`` and of dt_bias
    ``[chunk, HV, K]``.

    ``zero`` is 0, which the compiler does not know: loads that add it stay inside their loop. Moved out of it, they
    would fill the registers; inside, they come from the first-level cache.
    """
    kb = tl.program_id(0)
    hv = tl.program_id(1)
    chunk = tl.program_id(2).to(tl.int64)
    tile = chunk * HV + hv
    head = hv // G
    H = HV // G
    start = tl.load(table_ptr + 2 * chunk)
    end = tl.load(table_ptr + 2 * chunk + 1)
    rows = tl.arange(0, C)
    valid = start + rows < end
    tokens = (start + rows).to(tl.int64)
    narrow = new_ptr.dtype.element_ty
    i = rows[:, None]
    j = rows[None, :]
    square = tile * C * C + i * C + j
    cols = kb * BK + tl.arange(0, BK)

    dq = tl.zeros((C, BK), tl.float32)
    row = tl.zeros((C, BK), tl.float32)
    dk = tl.zeros((C, BK), tl.float32)
    dlast = tl.zeros((BK,), tl.float32)
    for vb in range(V // BV):
        vcols = vb * BV + tl.arange(0, BV)
        at_tile = (tile * C + i) * V + vcols[None, :]
        at_state = (tile * K + cols[:, None]) * V + vcols[None, :]
        at = (tokens[:, None] * HV + hv) * V + vcols[None, :]
        state = tl.load(states_ptr + at_state)
        dstate = tl.load(dstates_ptr + at_state)
        dlast += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        do = tl.load(do_ptr + at, mask=valid[:, None], other=0.0)
        dq = tl.dot(do, tl.trans(state), dq, input_precision=PREC)
        row = tl.dot(tl.load(x_ptr + at_tile), tl.trans(state), row, input_precision=PREC)
        dk = tl.dot(tl.load(new_ptr + at_tile), tl.trans(dstate), dk, input_precision=PREC)

    beta = load_beta(beta_ptr, tokens, valid, hv, HV, SIGMOID)
    q_norm = tl.load(norms_ptr + tile * 2 * C + rows)
    k_norm = tl.load(norms_ptr + tile * 2 * C + C + rows)
    total = tl.load(total_ptr + (tile * C + i) * K + cols[None, :])
    whole = tl.load(total_ptr + (tile * C + C - 1) * K + cols)
    e = tl.exp2(total)
    dq = dq * e
    row = -row * e
    dk = dk * tl.exp2(whole[None, :] - total) / k_norm[:, None]
    q = load_rows(q_ptr, tokens, valid, head, H, cols, K) * q_norm[:, None]
    k = load_rows(k_ptr, tokens, valid, head, H, cols, K) * k_norm[:, None]
    dlast = dlast * tl.exp2(whole) + tl.sum(k * dk, 0)
    share = beta * tl.sum(k * row, 1)
    row = row * beta[:, None]
    dtotal = q * dq + k * (row - dk)
    diagonal = tl.load(along_ptr + tile * 3 * C + 2 * C + rows)[:, None]
    dq += diagonal * k
    dk += row + diagonal * q

    for level in range(levels):
        again = tl.cast(level, tl.int64) * zero
        above, below = factors(total_ptr + again, tile, level, cols, K, levels, BLOCKED, C)
        k = load_rows(k_ptr + again, tokens, valid, head, H, cols, K) * k_norm[:, None]
        kf = (k * below).to(narrow)
        bf = (k * (above * beta[:, None])).to(narrow)
        qf = (load_rows(q_ptr + again, tokens, valid, head, H, cols, K) * q_norm[:, None] * above).to(narrow)
        mask = pair_mask(level, levels, BLOCKED, C)
        dp = tl.where(mask, tl.load(dp_ptr + again + square), 0.0).to(narrow)
        part = tl.dot(dp, kf, input_precision=PREC)
        dq += above * part
        dtotal += qf.to(tl.float32) * part
        da = tl.where(mask, tl.load(da_ptr + (again + tile * C * C) + square), 0.0).to(narrow)
        part = tl.dot(da, kf, input_precision=PREC)
        dk += above * beta[:, None] * part
        part *= bf.to(tl.float32)
        dtotal += part
        share += tl.sum(part, 1)
        part = tl.dot(tl.trans(dp), qf, input_precision=PREC)
        part = tl.dot(tl.trans(da), bf, part, input_precision=PREC)
        dk += below * part
        dtotal -= kf.to(tl.float32) * part

    q = load_rows(q_ptr, tokens, valid, head, H, cols, K) * q_norm[:, None]
    k = load_rows(k_ptr, tokens, valid, head, H, cols, K) * k_norm[:, None]
    at = (tokens[:, None] * HV + hv) * K + cols[None, :]
    q_along = tl.load(along_ptr + tile * 3 * C + rows) / (scale * scale)
    k_along = tl.load(along_ptr + tile * 3 * C + C + rows)
    share = tl.where(beta == 0.0, 0.0, share / tl.where(beta == 0.0, 1.0, beta))
    tl.store(shares_ptr + (tile * (K // BK + 1) + 1 + kb) * C + rows, share)
    dq = (dq - q * q_along[:, None]) * q_norm[:, None]
    dk = (dk - k * k_along[:, None]) * k_norm[:, None]
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=valid[:, None])
    tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=valid[:, None])
    dg = tl.where(valid[:, None], tl.cumsum(dtotal, 0, reverse=True) + dlast[None, :], 0.0)
    if GATE != GIVEN:
        speed = tl.exp(tl.load(a_log_ptr + hv).to(tl.float32))
        raw = tl.load(g_ptr + at, mask=valid[:, None], other=0.0).to(tl.float32)
        biased = raw + tl.load(bias_ptr + hv * K + cols).to(tl.float32)[None, :]
        if GATE == BOUNDED:
            gate = tl.sigmoid(speed * biased)
            dg = dg * (gate * (1.0 - gate) * lower)
            dspeed = tl.sum(dg * (speed * biased))
            dg = dg * speed
        else:
            dspeed = tl.sum(dg * log2_decay(raw, biased - raw, speed, lower, GATE)) / LOG2E
            dg = -dg * speed * tl.sigmoid(biased)
        tl.store(dbias_ptr + tile * K + cols, tl.sum(dg, 0))
        tl.store(dspeed_ptr + tile * (K // BK) + kb, dspeed)
    tl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), mask=valid[:, None])
