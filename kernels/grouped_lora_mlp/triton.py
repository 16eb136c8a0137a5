# mypy: disable-error-code="no-untyped-def"
"""The three grouped products of an expert MLP, and of its input gradient, on rows sorted by expert.

- ``gate_up_kernel``: x → gate, up → h = act(gate, up), with x gathered from tokens where asked;
- ``rows_kernel``: h → y, and (with the first weight the other way round) dgate_up → dx;
- ``activation_bwd_kernel``: dout → dh → dgate, dup, and each row's part of the routing weight's gradient.

One program makes one tile of up to 192 rows of one expert times ``BN`` weight columns. Weights are the M side
of the matrix units and rows the N side: rows come in pieces of 128, 64 and 32, so an expert with few rows
wastes little. Weights stream through three-dimensional descriptors [E, ., .]: bounds hold per expert, and no
address is ever a 32-bit product. The adapter's low-rank product ``z`` comes from its own launch and is
multiplied by B here, before the activation.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank, K slots a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.grouped_lora_mlp.activation import activate, activate_bwd


@triton.jit
def _tile(tiles, columns, GROUP: tl.constexpr):
    """Program → (row tile, column tile): ``GROUP`` row tiles share a weight tile before the next column."""
    program = tl.program_id(0)
    group = program // (GROUP * columns)
    first = group * GROUP
    size = tl.minimum(tiles - first, GROUP)
    inside = program % (GROUP * columns)
    return first + inside % size, inside // size


@triton.jit
def _weight(desc, expert, n, k, BN: tl.constexpr, BK: tl.constexpr, N_FIRST: tl.constexpr):
    """A weight tile [BN, BK], from storage [E, N, K] (``N_FIRST``) or [E, K, N]."""
    if N_FIRST:
        return desc.load([expert, n, k]).reshape(BN, BK)
    else:
        return desc.load([expert, k, n]).reshape(BK, BN).T


@triton.jit
def _tokens(entry_ptr, rows, last, SLOTS, GATHER: tl.constexpr):
    """The token of each row; rows past the tile's end take a token that exists."""
    if GATHER:
        return (tl.load(entry_ptr + rows, mask=rows < last, other=0) // SLOTS).to(tl.int64)
    else:
        return rows.to(tl.int64)


@triton.jit
def _input(desc, pointers, first, k, depth, BK: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr):
    """A tile of input rows as [BK, rows]: gathered by pointer, or contiguous through a descriptor."""
    if GATHER:
        if EVEN:
            return tl.load(pointers + k).T
        else:
            return tl.load(pointers + k, mask=(k + tl.arange(0, BK) < depth)[None, :], other=0.0).T
    else:
        return desc.load([first, k]).T


@triton.jit
def _low_rank(acc, z_ptr, b_ptr, expert, rows, last, n, width, RANK, b_stride_n, b_stride_r, RP: tl.constexpr):
    """Add ``B z`` to ``acc [BN, rows]``: B is [E, width, RANK] in any stride order."""
    ranks = tl.arange(0, RP)
    z = tl.load(
        z_ptr + rows.to(tl.int64)[:, None] * RANK + ranks[None, :],
        mask=(rows < last)[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )
    at = b_ptr + expert.to(tl.int64) * width * RANK + n.to(tl.int64)[:, None] * b_stride_n + ranks[None, :] * b_stride_r
    b = tl.load(at, mask=(n < width)[:, None] & (ranks < RANK)[None, :], other=0.0)
    return tl.dot(b, z.T, acc, input_precision="ieee")


@triton.jit
def _store_rows(pointer, value, rows, last, n, width, stride):
    """Store ``value [BN, rows]`` as rows of a [R, .] tensor, n being columns."""
    at = pointer + rows.to(tl.int64)[:, None] * stride + n[None, :]
    tl.store(at, tl.trans(value).to(pointer.dtype.element_ty), mask=(rows < last)[:, None] & (n < width)[None, :])


@triton.jit
def _finish_gate_up(
    g, u, gu_ptr, h_ptr, z_ptr, b_ptr, expert, first, last, n, I, F, RANK, ROWS: tl.constexpr,
    STEP: tl.constexpr, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    GATED: tl.constexpr, SAVE: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Adapter, saved pre-activations, activation, h.

    Gate columns are n·STEP; up columns lie I later, or 1 where they interleave.
    """
    rows = first + tl.arange(0, ROWS)
    up = 1 if STEP == 2 else I
    gate_at = tl.where(n < I, n * STEP, F)
    up_at = tl.where(n < I, n * STEP + up, F)
    if LORA:
        g = _low_rank(g, z_ptr, b_ptr, expert, rows, last, gate_at, F, RANK, RANK, 1, RP)
        if GATED:
            u = _low_rank(u, z_ptr, b_ptr, expert, rows, last, up_at, F, RANK, RANK, 1, RP)
    if SAVE:
        _store_rows(gu_ptr, g, rows, last, gate_at, F, F)
        if GATED:
            _store_rows(gu_ptr, u, rows, last, up_at, F, F)
    _store_rows(h_ptr, activate(g, u, KIND, P0, P1, P2), rows, last, n, I, I)


@triton.jit
def _gate_up_tile(
    x_ptr, xa_desc, xb_desc, gate_desc, up_desc, gu_ptr, h_ptr, entry_ptr, z_ptr, b_ptr, expert, first, last, column,
    H, I, F, RANK, SLOTS, BA: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATHER: tl.constexpr, EVEN: tl.constexpr, N_FIRST: tl.constexpr, SPLIT: tl.constexpr, STEP: tl.constexpr,
    KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, GATED: tl.constexpr,
    SAVE: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """One tile of BA (+ BB) rows. ``SPLIT``: gate and up interleave along the fast axis, one tile holds both."""
    depth = tl.arange(0, BK)
    rows_a = first + tl.arange(0, BA)
    at_a = x_ptr + _tokens(entry_ptr, rows_a, last, SLOTS, GATHER)[:, None] * H + depth[None, :]
    BM: tl.constexpr = 2 * BN if SPLIT else BN
    ga = tl.zeros([BM, BA], tl.float32)
    ua = tl.zeros([BN, BA], tl.float32)
    if BB > 0:
        rows_b = first + BA + tl.arange(0, BB)
        at_b = x_ptr + _tokens(entry_ptr, rows_b, last, SLOTS, GATHER)[:, None] * H + depth[None, :]
        gb = tl.zeros([BM, BB], tl.float32)
        ub = tl.zeros([BN, BB], tl.float32)
    n0 = column * BN
    for k in tl.range(0, H, BK):
        xa = _input(xa_desc, at_a, first, k, H, BK, GATHER, EVEN)
        gate = _weight(gate_desc, expert, column * BM, k, BM, BK, N_FIRST)
        ga = tl.dot(gate, xa, ga, input_precision="ieee")
        if BB > 0:
            xb = _input(xb_desc, at_b, first + BA, k, H, BK, GATHER, EVEN)
            gb = tl.dot(gate, xb, gb, input_precision="ieee")
        if GATED and not SPLIT:
            up = _weight(up_desc, expert, n0, k, BN, BK, N_FIRST)
            ua = tl.dot(up, xa, ua, input_precision="ieee")
            if BB > 0:
                ub = tl.dot(up, xb, ub, input_precision="ieee")
    n = n0 + tl.arange(0, BN)
    # The small piece leaves first, so that registers are free when the large one is stored.
    if BB > 0:
        if SPLIT:
            gb, ub = tl.split(tl.permute(tl.reshape(gb, [BN, 2, BB]), [0, 2, 1]))
        _finish_gate_up(gb, ub, gu_ptr, h_ptr, z_ptr, b_ptr, expert, first + BA, last, n, I, F, RANK, BB,
                        STEP, KIND, P0, P1, P2, GATED, SAVE, LORA, RP)  # fmt: skip
    if SPLIT:
        ga, ua = tl.split(tl.permute(tl.reshape(ga, [BN, 2, BA]), [0, 2, 1]))
    _finish_gate_up(ga, ua, gu_ptr, h_ptr, z_ptr, b_ptr, expert, first, tl.minimum(last, first + BA), n, I, F, RANK, BA,
                    STEP, KIND, P0, P1, P2, GATED, SAVE, LORA, RP)  # fmt: skip


@triton.jit(do_not_specialize=["SLOTS"])
def gate_up_kernel(
    x_ptr, x128_desc, x64_desc, x32_desc, gate_desc, up_desc, gu_ptr, h_ptr, entry_ptr, z_ptr, b_ptr,
    expert_ptr, first_ptr, last_ptr, tiles_ptr, H, I, F, RANK, SLOTS,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr,
    N_FIRST: tl.constexpr, SPLIT: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, P2: tl.constexpr, GATED: tl.constexpr, SAVE: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """``h [R, I]`` and, with ``SAVE``, the pre-activations ``gu [R, F]`` in the weight's own column order."""
    tiles, columns = tl.load(tiles_ptr), tl.cdiv(I, BN)
    if tl.program_id(0) < tiles * columns:
        tile, column = _tile(tiles, columns, GROUP)
        expert, first, last = tl.load(expert_ptr + tile), tl.load(first_ptr + tile), tl.load(last_ptr + tile)
        rows = last - first
        if rows > 160:
            _gate_up_tile(x_ptr, x128_desc, x64_desc, gate_desc, up_desc, gu_ptr, h_ptr, entry_ptr, z_ptr, b_ptr,
                          expert, first, last, column, H, I, F, RANK, SLOTS, 128, 64, BN, BK, GATHER, EVEN, N_FIRST,
                          SPLIT, STEP, KIND, P0, P1, P2, GATED, SAVE, LORA, RP)  # fmt: skip
        elif rows > 128:
            _gate_up_tile(x_ptr, x128_desc, x32_desc, gate_desc, up_desc, gu_ptr, h_ptr, entry_ptr, z_ptr, b_ptr,
                          expert, first, last, column, H, I, F, RANK, SLOTS, 128, 32, BN, BK, GATHER, EVEN, N_FIRST,
                          SPLIT, STEP, KIND, P0, P1, P2, GATED, SAVE, LORA, RP)  # fmt: skip
        elif rows > 64:
            _gate_up_tile(x_ptr, x128_desc, x128_desc, gate_desc, up_desc, gu_ptr, h_ptr, entry_ptr, z_ptr, b_ptr,
                          expert, first, last, column, H, I, F, RANK, SLOTS, 128, 0, BN, BK, GATHER, EVEN, N_FIRST,
                          SPLIT, STEP, KIND, P0, P1, P2, GATED, SAVE, LORA, RP)  # fmt: skip
        elif rows > 0:
            _gate_up_tile(x_ptr, x64_desc, x64_desc, gate_desc, up_desc, gu_ptr, h_ptr, entry_ptr, z_ptr, b_ptr,
                          expert, first, last, column, H, I, F, RANK, SLOTS, 64, 0, BN, BK, GATHER, EVEN, N_FIRST,
                          SPLIT, STEP, KIND, P0, P1, P2, GATED, SAVE, LORA, RP)  # fmt: skip


@triton.jit
def _finish_rows(
    acc, y_ptr, z_ptr, b_ptr, expert, first, last, n, N, RANK, b_stride_n, b_stride_r, ROWS: tl.constexpr,
    LORA: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    rows = first + tl.arange(0, ROWS)
    if LORA:
        acc = _low_rank(acc, z_ptr, b_ptr, expert, rows, last, n, N, RANK, b_stride_n, b_stride_r, RP)
    _store_rows(y_ptr, acc, rows, last, n, N, N)


@triton.jit
def _rows_tile(
    xa_desc, xb_desc, w_desc, y_ptr, z_ptr, b_ptr, expert, first, last, column, N, K, RANK, b_stride_n, b_stride_r,
    BA: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, N_FIRST: tl.constexpr,
    LORA: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    acc_a = tl.zeros([BN, BA], tl.float32)
    if BB > 0:
        acc_b = tl.zeros([BN, BB], tl.float32)
    for k in tl.range(0, K, BK):
        w = _weight(w_desc, expert, column * BN, k, BN, BK, N_FIRST)
        acc_a = tl.dot(w, xa_desc.load([first, k]).T, acc_a, input_precision="ieee")
        if BB > 0:
            acc_b = tl.dot(w, xb_desc.load([first + BA, k]).T, acc_b, input_precision="ieee")
    n = column * BN + tl.arange(0, BN)
    if BB > 0:
        _finish_rows(
            acc_b, y_ptr, z_ptr, b_ptr, expert, first + BA, last, n, N, RANK, b_stride_n, b_stride_r, BB, LORA, RP
        )
    last_a = tl.minimum(last, first + BA)
    _finish_rows(acc_a, y_ptr, z_ptr, b_ptr, expert, first, last_a, n, N, RANK, b_stride_n, b_stride_r, BA, LORA, RP)


@triton.jit
def rows_kernel(
    x128_desc, x64_desc, x32_desc, w_desc, y_ptr, z_ptr, b_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr,
    N, K, RANK, b_stride_n, b_stride_r, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    N_FIRST: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """``y [R, N] = x [R, K] Wᵀ (+ z Bᵀ)`` for contiguous rows."""
    tiles, columns = tl.load(tiles_ptr), tl.cdiv(N, BN)
    if tl.program_id(0) < tiles * columns:
        tile, column = _tile(tiles, columns, GROUP)
        expert, first, last = tl.load(expert_ptr + tile), tl.load(first_ptr + tile), tl.load(last_ptr + tile)
        rows = last - first
        if rows > 160:
            _rows_tile(x128_desc, x64_desc, w_desc, y_ptr, z_ptr, b_ptr, expert, first, last, column, N, K, RANK,
                       b_stride_n, b_stride_r, 128, 64, BN, BK, N_FIRST, LORA, RP)  # fmt: skip
        elif rows > 128:
            _rows_tile(x128_desc, x32_desc, w_desc, y_ptr, z_ptr, b_ptr, expert, first, last, column, N, K, RANK,
                       b_stride_n, b_stride_r, 128, 32, BN, BK, N_FIRST, LORA, RP)  # fmt: skip
        elif rows > 64:
            _rows_tile(x128_desc, x128_desc, w_desc, y_ptr, z_ptr, b_ptr, expert, first, last, column, N, K, RANK,
                       b_stride_n, b_stride_r, 128, 0, BN, BK, N_FIRST, LORA, RP)  # fmt: skip
        elif rows > 0:
            _rows_tile(x64_desc, x64_desc, w_desc, y_ptr, z_ptr, b_ptr, expert, first, last, column, N, K, RANK,
                       b_stride_n, b_stride_r, 64, 0, BN, BK, N_FIRST, LORA, RP)  # fmt: skip


@triton.jit
def _finish_dh(
    acc, dgu_ptr, t_ptr, a_ptr, expert, first, last, n, I, F, RANK, ROWS: tl.constexpr, STEP: tl.constexpr,
    LORA: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Adapter, then the raw gradient of h, stored where dgate will stand."""
    rows = first + tl.arange(0, ROWS)
    if LORA:
        acc = _low_rank(acc, t_ptr, a_ptr, expert, rows, last, n, I, RANK, 1, I, RP)
    _store_rows(dgu_ptr, acc, rows, last, tl.where(n < I, n * STEP, F), F, F)


@triton.jit
def _dh_tile(
    d_ptr, da_desc, db_desc, w_desc, dgu_ptr, entry_ptr, t_ptr, a_ptr, expert, first, last, column, H, I, F, RANK,
    SLOTS, BA: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATHER: tl.constexpr,
    EVEN: tl.constexpr, N_FIRST: tl.constexpr, STEP: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    depth = tl.arange(0, BK)
    rows_a = first + tl.arange(0, BA)
    at_a = d_ptr + _tokens(entry_ptr, rows_a, last, SLOTS, GATHER)[:, None] * H + depth[None, :]
    acc_a = tl.zeros([BN, BA], tl.float32)
    if BB > 0:
        rows_b = first + BA + tl.arange(0, BB)
        at_b = d_ptr + _tokens(entry_ptr, rows_b, last, SLOTS, GATHER)[:, None] * H + depth[None, :]
        acc_b = tl.zeros([BN, BB], tl.float32)
    for k in tl.range(0, H, BK):
        w = _weight(w_desc, expert, column * BN, k, BN, BK, N_FIRST)
        acc_a = tl.dot(w, _input(da_desc, at_a, first, k, H, BK, GATHER, EVEN), acc_a, input_precision="ieee")
        if BB > 0:
            acc_b = tl.dot(w, _input(db_desc, at_b, first + BA, k, H, BK, GATHER, EVEN), acc_b, input_precision="ieee")
    n = column * BN + tl.arange(0, BN)
    if BB > 0:
        _finish_dh(acc_b, dgu_ptr, t_ptr, a_ptr, expert, first + BA, last, n, I, F, RANK, BB, STEP, LORA, RP)
    _finish_dh(
        acc_a, dgu_ptr, t_ptr, a_ptr, expert, first, tl.minimum(last, first + BA), n, I, F, RANK, BA, STEP, LORA, RP
    )


@triton.jit(do_not_specialize=["SLOTS"])
def activation_bwd_kernel(
    d_ptr, d128_desc, d64_desc, d32_desc, w_desc, gu_ptr, dgu_ptr, part_ptr, weights_ptr, entry_ptr, t_ptr, a_ptr,
    expert_ptr, first_ptr, last_ptr, tiles_ptr, H, I, F, RANK, SLOTS, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr, N_FIRST: tl.constexpr, STEP: tl.constexpr,
    KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, GATED: tl.constexpr,
    WEIGHTED: tl.constexpr, PARTS: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """``dgu [R, F]`` from dout, and ``part [R, columns]``: each row's share of its routing weight's gradient.

    The weight's gradient is dout · y = (dout W₂) · h, so y is not kept. The product's tile leaves the
    registers before the activation's gradient: it is stored rounded, read back in strips of rows out of the
    cache by the same program, and overwritten. Both halves of that in registers would spill.
    """
    tiles, columns = tl.load(tiles_ptr), tl.cdiv(I, BN)
    if tl.program_id(0) < tiles * columns:
        tile, column = _tile(tiles, columns, GROUP)
        expert, first, last = tl.load(expert_ptr + tile), tl.load(first_ptr + tile), tl.load(last_ptr + tile)
        rows = last - first
        if rows > 160:
            _dh_tile(d_ptr, d128_desc, d64_desc, w_desc, dgu_ptr, entry_ptr, t_ptr, a_ptr, expert, first, last, column,
                     H, I, F, RANK, SLOTS, 128, 64, BN, BK, GATHER, EVEN, N_FIRST, STEP, LORA, RP)  # fmt: skip
        elif rows > 128:
            _dh_tile(d_ptr, d128_desc, d32_desc, w_desc, dgu_ptr, entry_ptr, t_ptr, a_ptr, expert, first, last, column,
                     H, I, F, RANK, SLOTS, 128, 32, BN, BK, GATHER, EVEN, N_FIRST, STEP, LORA, RP)  # fmt: skip
        elif rows > 64:
            _dh_tile(d_ptr, d128_desc, d128_desc, w_desc, dgu_ptr, entry_ptr, t_ptr, a_ptr, expert, first, last, column,
                     H, I, F, RANK, SLOTS, 128, 0, BN, BK, GATHER, EVEN, N_FIRST, STEP, LORA, RP)  # fmt: skip
        elif rows > 0:
            _dh_tile(d_ptr, d64_desc, d64_desc, w_desc, dgu_ptr, entry_ptr, t_ptr, a_ptr, expert, first, last, column,
                     H, I, F, RANK, SLOTS, 64, 0, BN, BK, GATHER, EVEN, N_FIRST, STEP, LORA, RP)  # fmt: skip
        tl.debug_barrier()
        n = column * BN + tl.arange(0, BN)
        up = 1 if STEP == 2 else I
        for start in tl.range(first, last, STRIP, num_stages=1):
            strip = start + tl.arange(0, STRIP)
            live = (strip < last)[:, None] & (n < I)[None, :]
            at = strip.to(tl.int64)[:, None] * F + (n * STEP)[None, :]
            dh = tl.load(dgu_ptr + at, mask=live, other=0.0).to(tl.float32)
            g = tl.load(gu_ptr + at, mask=live, other=0.0).to(tl.float32)
            u = g
            if GATED:
                u = tl.load(gu_ptr + at + up, mask=live, other=0.0).to(tl.float32)
            if PARTS:
                part = tl.sum(dh * activate(g, u, KIND, P0, P1, P2), axis=1)
                tl.store(part_ptr + strip.to(tl.int64) * columns + column, part, mask=strip < last)
            if WEIGHTED:
                entry = tl.load(entry_ptr + strip, mask=strip < last, other=0)
                dh *= tl.load(weights_ptr + entry, mask=strip < last, other=0.0).to(tl.float32)[:, None]
            dg, du = activate_bwd(dh, g, u, KIND, P0, P1, P2)
            tl.store(dgu_ptr + at, dg.to(dgu_ptr.dtype.element_ty), mask=live)
            if GATED:
                tl.store(dgu_ptr + at + up, du.to(dgu_ptr.dtype.element_ty), mask=live)
