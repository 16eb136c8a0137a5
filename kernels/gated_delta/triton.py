# mypy: disable-error-code="no-untyped-def"
"""Kernels of the delta rule with one gate for a head (Gated DeltaNet): what is inside a chunk, and its gradients.

The decay of a pair is one number, ``D_ij = exp2(total_i - total_j)``: products of raw q and k need no levels, nothing
is rounded before them, and no gate is widened to channels. The chain of chunks is that of KDA.

Legend: C tokens of a chunk, H key heads, HV value heads, G = HV / H, K key width, V value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.kda.triton import (
    GIVEN,
    LOG2E,
    NORM_EPS,
    load_beta,
    load_rows,
    log2_decay,
)


@triton.jit
def pair_decay(total_ptr, tile, C: tl.constexpr):
    """``[C, C]``: the decay from column to row, 0 above the diagonal."""
    i = tl.arange(0, C)
    total = tl.load(total_ptr + tile * C + i)
    again = tl.load(total_ptr + tile * C + i)
    span = tl.minimum(total[:, None] - again[None, :], 0.0)
    return tl.where(i[:, None] >= i[None, :], tl.exp2(span), 0.0)


@triton.jit
def unit_lower_inverse(a, doublings, C: tl.constexpr, PREC: tl.constexpr):
    """``(I + a)⁻¹`` of a strictly lower triangular ``a [C, C]``, fp32.

    It grows from blocks of one token to the chunk: no power of a is formed, so that entries stay as small as those of
    the inverse itself. ``doublings`` is log2 C, an argument, so that the loop stays a loop.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    x = tl.where(i == j, 1.0, 0.0) - tl.where((i ^ j) == 1, a, 0.0)
    for level in range(1, doublings):
        x -= tl.dot(x, tl.dot(tl.where(((i ^ j) >> level) == 1, a, 0.0), x, input_precision=PREC), input_precision=PREC)
    return x


@triton.jit
def scalar_gate_kernel(
    g_ptr, a_log_ptr, bias_ptr, table_ptr, total_ptr, lower, HV,
    BH: tl.constexpr, C: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Running sums of log2-decays inside one chunk of a block of value heads: ``total [.., HV, C]`` in fp32."""
    heads = tl.program_id(0) * BH + tl.arange(0, BH)
    chunk = tl.program_id(1).to(tl.int64)
    start = tl.load(table_ptr + 2 * chunk)
    end = tl.load(table_ptr + 2 * chunk + 1)
    rows = tl.arange(0, C)
    there = heads < HV
    valid = (start + rows < end)[:, None] & there[None, :]
    tokens = (start + rows).to(tl.int64)
    raw = tl.load(g_ptr + tokens[:, None] * HV + heads[None, :], mask=valid, other=0.0).to(tl.float32)
    bias = 0.0
    speed = 1.0
    if GATE != GIVEN:
        bias = tl.load(bias_ptr + heads, mask=there, other=0.0).to(tl.float32)[None, :]
        speed = tl.exp(tl.load(a_log_ptr + heads, mask=there, other=0.0).to(tl.float32))[None, :]
    decay = tl.where(valid, log2_decay(raw, bias, speed, lower, GATE), 0.0)
    at = (chunk * HV + heads[None, :]) * C + rows[:, None]
    tl.store(total_ptr + at, tl.cumsum(decay, 0), mask=there[None, :])


@triton.jit
def scalar_prepare_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, total_ptr, table_ptr,
    w_ptr, u_ptr, qe_ptr, ke_ptr, p_ptr, inverse_ptr, norms_ptr,
    scale, HV, G, doublings,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SIGMOID: tl.constexpr, SOLVED: tl.constexpr, PREC: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: outputs as ``kda_pairs_kernel`` and ``kda_widths_kernel``; with SOLVED those of the
    second alone, from what an earlier launch left."""
    hv = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
    tile = chunk * HV + hv
    head = hv // G
    H = HV // G
    start = tl.load(table_ptr + 2 * chunk)
    end = tl.load(table_ptr + 2 * chunk + 1)
    rows = tl.arange(0, C)
    valid = start + rows < end
    tokens = (start + rows).to(tl.int64)
    narrow = w_ptr.dtype.element_ty
    i = rows[:, None]
    j = rows[None, :]
    beta = load_beta(beta_ptr, tokens, valid, hv, HV, SIGMOID)
    square = tile * C * C + i * C + j
    norms = norms_ptr + tile * 2 * C + rows
    if SOLVED:
        inverse = tl.load(inverse_ptr + square)
        q_norm = tl.load(norms)
        k_norm = tl.load(norms + C)
    else:
        between = tl.zeros((C, C), tl.float32)
        reads = tl.zeros((C, C), tl.float32)
        q_squares = tl.zeros((C,), tl.float32)
        k_squares = tl.zeros((C,), tl.float32)
        for kb in range(K // BK):
            cols = kb * BK + tl.arange(0, BK)
            q = load_rows(q_ptr, tokens, valid, head, H, cols, K)
            k = load_rows(k_ptr, tokens, valid, head, H, cols, K)
            q_squares += tl.sum(q * q, 1)
            k_squares += tl.sum(k * k, 1)
            kf = k.to(narrow)
            between = tl.dot(kf, tl.trans(kf), between, input_precision=PREC)
            reads = tl.dot(q.to(narrow), tl.trans(kf), reads, input_precision=PREC)
        q_norm = scale / tl.sqrt(q_squares + NORM_EPS)
        k_norm = 1.0 / tl.sqrt(k_squares + NORM_EPS)
        decay = pair_decay(total_ptr, tile, C)
        tl.store(p_ptr + square, (reads * decay * q_norm[:, None] * k_norm[None, :]).to(narrow))
        between = tl.where(i > j, between * decay * (beta * k_norm)[:, None] * k_norm[None, :], 0.0)
        inverse = unit_lower_inverse(between, doublings, C, SOLVE).to(narrow)
        tl.store(inverse_ptr + square, inverse)
        tl.store(norms, q_norm)
        tl.store(norms + C, k_norm)
    for vb in range(V // BV):
        cols = vb * BV + tl.arange(0, BV)
        v = load_rows(v_ptr, tokens, valid, hv, HV, cols, V)
        u = tl.dot(inverse, (v * beta[:, None]).to(narrow), input_precision=PREC)
        tl.store(u_ptr + (tile * C + i) * V + cols[None, :], u.to(narrow))
    total = tl.load(total_ptr + tile * C + rows)
    e = tl.exp2(total)
    rest = tl.exp2(tl.load(total_ptr + tile * C + C - 1) - total)
    for kb in range(K // BK):
        cols = kb * BK + tl.arange(0, BK)
        at = (tile * C + i) * K + cols[None, :]
        k = load_rows(k_ptr, tokens, valid, head, H, cols, K) * k_norm[:, None]
        w = tl.dot(inverse, (k * (e * beta)[:, None]).to(narrow), input_precision=PREC)
        tl.store(w_ptr + at, w.to(narrow))
        tl.store(ke_ptr + at, (k * rest[:, None]).to(narrow))
        q = load_rows(q_ptr, tokens, valid, head, H, cols, K) * q_norm[:, None]
        tl.store(qe_ptr + at, (q * e[:, None]).to(narrow))


@triton.jit
def scalar_keys_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, a_log_ptr, bias_ptr, total_ptr, table_ptr, do_ptr,
    norms_ptr, new_ptr, x_ptr, states_ptr, dstates_ptr, dp_ptr, da_ptr, along_ptr,
    dq_ptr, dk_ptr, dg_ptr, dspeed_ptr, dbias_ptr,
    lower, scale, HV, G,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, SIGMOID: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: gradients of q, k and the gate.

    Writes dq, dk ``[tokens, HV, K]``, dg ``[tokens, HV]`` and this chunk's share of the gradients of A_log and dt_bias
    ``[chunk, HV]`` in fp32.
    """
    hv = tl.program_id(0)
    chunk = tl.program_id(1).to(tl.int64)
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
    beta = load_beta(beta_ptr, tokens, valid, hv, HV, SIGMOID)
    q_norm = tl.load(norms_ptr + tile * 2 * C + rows)
    k_norm = tl.load(norms_ptr + tile * 2 * C + C + rows)
    total = tl.load(total_ptr + tile * C + rows)
    whole = tl.load(total_ptr + tile * C + C - 1)
    e = tl.exp2(total)
    rest = tl.exp2(whole - total)
    decay = pair_decay(total_ptr, tile, C)
    dp = (tl.where(i > j, tl.load(dp_ptr + square).to(tl.float32), 0.0) * decay).to(narrow)
    diagonal = tl.load(dp_ptr + tile * C * C + rows * (C + 1)).to(tl.float32)[:, None]
    da = (tl.load(da_ptr + square).to(tl.float32) * decay).to(narrow)
    q_along = tl.load(along_ptr + tile * 2 * C + rows) / (scale * scale)
    k_along = tl.load(along_ptr + tile * 2 * C + C + rows)
    dtotal = tl.zeros((C,), tl.float32)
    dlast = 0.0
    for kb in range(K // BK):
        cols = kb * BK + tl.arange(0, BK)
        dq = tl.zeros((C, BK), tl.float32)
        row = tl.zeros((C, BK), tl.float32)
        dk = tl.zeros((C, BK), tl.float32)
        for vb in range(V // BV):
            vcols = vb * BV + tl.arange(0, BV)
            at_tile = (tile * C + i) * V + vcols[None, :]
            at_state = (tile * K + cols[:, None]) * V + vcols[None, :]
            at = (tokens[:, None] * HV + hv) * V + vcols[None, :]
            state = tl.load(states_ptr + at_state)
            dstate = tl.load(dstates_ptr + at_state)
            dlast += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
            do = tl.load(do_ptr + at, mask=valid[:, None], other=0.0)
            dq = tl.dot(do, tl.trans(state), dq, input_precision=PREC)
            row = tl.dot(tl.load(x_ptr + at_tile), tl.trans(state), row, input_precision=PREC)
            dk = tl.dot(tl.load(new_ptr + at_tile), tl.trans(dstate), dk, input_precision=PREC)
        q = load_rows(q_ptr, tokens, valid, head, H, cols, K) * q_norm[:, None]
        k = load_rows(k_ptr, tokens, valid, head, H, cols, K) * k_norm[:, None]
        dq = dq * e[:, None]
        row = -row * (e * beta)[:, None]
        dk = dk * rest[:, None]
        at_end = tl.sum(k * dk, 1)
        dtotal += tl.sum(q * dq + k * row, 1) - at_end
        dtotal += tl.where(rows == C - 1, tl.sum(at_end), 0.0)
        dk += row + diagonal * q
        dq += diagonal * k
        kf = k.to(narrow)
        bf = (k * beta[:, None]).to(narrow)
        qf = q.to(narrow)
        reads = tl.dot(dp, kf, input_precision=PREC)
        writes = tl.dot(da, kf, input_precision=PREC)
        columns = tl.dot(tl.trans(dp), qf, input_precision=PREC)
        columns = tl.dot(tl.trans(da), bf, columns, input_precision=PREC)
        pairs = qf.to(tl.float32) * reads + bf.to(tl.float32) * writes - kf.to(tl.float32) * columns
        dtotal += tl.sum(pairs, 1)
        dq = (dq + reads - q * q_along[:, None]) * q_norm[:, None]
        dk = (dk + beta[:, None] * writes + columns - k * k_along[:, None]) * k_norm[:, None]
        to = (tokens[:, None] * HV + hv) * K + cols[None, :]
        tl.store(dq_ptr + to, dq.to(dq_ptr.dtype.element_ty), mask=valid[:, None])
        tl.store(dk_ptr + to, dk.to(dk_ptr.dtype.element_ty), mask=valid[:, None])
    dlast = dlast * tl.exp2(whole)
    dg = tl.where(valid, tl.cumsum(dtotal, 0, reverse=True) + dlast, 0.0)
    at_g = tokens * HV + hv
    if GATE != GIVEN:
        speed = tl.exp(tl.load(a_log_ptr + hv).to(tl.float32))
        raw = tl.load(g_ptr + at_g, mask=valid, other=0.0).to(tl.float32)
        biased = raw + tl.load(bias_ptr + hv).to(tl.float32)
        dspeed = tl.sum(dg * log2_decay(raw, biased - raw, speed, lower, GATE)) / LOG2E
        dg = -dg * speed * tl.sigmoid(biased)
        tl.store(dbias_ptr + tile, tl.sum(dg))
        tl.store(dspeed_ptr + tile, dspeed)
    tl.store(dg_ptr + at_g, dg.to(dg_ptr.dtype.element_ty), mask=valid)
