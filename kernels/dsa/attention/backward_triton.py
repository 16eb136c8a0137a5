# mypy: disable-error-code="no-untyped-def"
"""Backward over selected keys, portable: gate and row sums, shares, dQ, then dK and dV in one of three ways.

``shares_kernel`` recomputes P and dS of a run of queries into a workspace, ``queries_kernel`` makes dQ of it. What each
selected key gets, dSᵀ·Q + Pᵀ·dO, then goes out

- by fp32 atomics straight to the key's row (``contributions_kernel``, ``SORTED`` off);
- or as one row a pair, in the order of keys, which ``sums_kernel`` adds up in that fixed order;
- or, for blocks of keys, summed over all queries of a block by the one program that owns it (``blocks_kernel``).

Legend: as in ``triton``; C queries of a run, E positions of a stored row of P, W columns of a key's gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.dsa.attention.triton import LOG2_E, filled, keys_at, load_rows, product, visible


@triton.jit
def permuted(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Columns inside each group of 16 so that a matrix accumulator holds four neighbours a thread.

    Position 8i + 2l + e takes column 4l + 2i + e.
    """
    parts = tl.reshape(x, [ROWS, WIDTH // 16, 4, 2, 2])
    return tl.reshape(tl.permute(parts, [0, 1, 3, 2, 4]), [ROWS, WIDTH])


@triton.jit
def permute_kernel(
    x_ptr, out_ptr, N, H, x_token, x_head, out_row, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """``out [N, WIDTH]`` (rows ``out_row`` apart) of x's rows (token, head), columns permuted."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    at = x_ptr + (row // H * x_token + row % H * x_head)[:, None] + columns[None, :]
    x = tl.load(at, mask=(row < N)[:, None], other=0.0)
    tl.store(out_ptr + row[:, None] * out_row + columns[None, :], permuted(x, ROWS, WIDTH), mask=(row < N)[:, None])


@triton.jit
def prepare_kernel(
    dy_ptr, o_ptr, low_ptr, gate_ptr, do_ptr, delta_ptr, dgate_ptr, N, DV: tl.constexpr, PV: tl.constexpr,
    ROWS: tl.constexpr, GATE: tl.constexpr, STORE: tl.constexpr, PERMUTE: tl.constexpr,
):  # fmt: skip
    """Rows (t, h): dO = dy · σ(gate), dgate, and delta = Σ o · dO in fp32 from both parts of o."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PV)
    at = row[:, None] * DV + columns[None, :]
    mask = (row < N)[:, None] & (columns < DV)[None, :]
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + at, mask=mask, other=0.0).to(tl.float32)
    o += tl.load(low_ptr + at, mask=mask, other=0.0).to(tl.float32)
    do = dy
    if GATE != "":
        if GATE == "head":
            z = tl.load(gate_ptr + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
        else:
            z = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
        open_ = 1.0 / (1.0 + tl.exp2(-z * LOG2_E))
        closed = 1.0 / (1.0 + tl.exp2(z * LOG2_E))
        do = dy * open_
        dz = do * o * closed
        kind = dgate_ptr.dtype.element_ty
        if GATE == "head":
            tl.store(dgate_ptr + row, tl.sum(dz, 1).to(kind), mask=row < N)
        else:
            tl.store(dgate_ptr + at, dz.to(kind), mask=mask)
    # delta of the rounded dO: it must cancel against dP, which is made of that.
    out = do.to(dy_ptr.dtype.element_ty)
    tl.store(delta_ptr + row, tl.sum(o * out.to(tl.float32), 1), mask=row < N)
    if STORE:
        if PERMUTE:
            out = permuted(out, ROWS, PV)
        tl.store(do_ptr + at, out, mask=mask)


@triton.jit
def shares_kernel(
    qn_ptr, qr_ptr, kn_ptr, kr_ptr, v_ptr, index_ptr, bounds_ptr, do_ptr, lse_ptr, delta_ptr, p_ptr, ds_ptr, scale,
    start_token, COUNT, COLUMNS, KEYS, H, G, E, qn_token, qn_head, qr_token, qr_head, kn_row, kn_head, kr_row, kr_head,
    v_row, v_head, HEADS: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, DV: tl.constexpr, PN: tl.constexpr,
    PR: tl.constexpr, PV: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr, BOUNDED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """P and dS ``[C, H, E]`` of the queries from ``start_token`` on."""
    blocks: tl.constexpr = (HEADS + BH - 1) // BH
    pid = tl.program_id(0)
    c = (pid // (blocks * G)).to(tl.int64)
    t = c + start_token
    g = (pid // blocks % G).to(tl.int64)
    inside = pid % blocks * BH + tl.arange(0, BH)
    head = g * HEADS + inside
    live = (inside < HEADS)[:, None]
    columns, rotated, wide = tl.arange(0, PN), tl.arange(0, PR), tl.arange(0, PV)
    first, last = visible(bounds_ptr, t, KEYS, BOUNDED)
    index_ptr += (t * G + g) * COLUMNS
    # Whole entries, seen or not: who owns a block reads all its columns.
    count, _ = filled(index_ptr, COUNT, 0, KEYS, BLOCK, POSITIONS)
    count = (count + BLOCK - 1) // BLOCK * BLOCK
    at = qn_ptr + t * qn_token + head[:, None] * qn_head + columns[None, :]
    qn = tl.load(at, mask=live & (columns < DN)[None, :], other=0.0)
    if DR > 0:
        at = qr_ptr + t * qr_token + head[:, None] * qr_head + rotated[None, :]
        qr = tl.load(at, mask=live & (rotated < DR)[None, :], other=0.0)
    at = do_ptr + (t * H + head)[:, None] * DV + wide[None, :]
    do = tl.load(at, mask=live & (wide < DV)[None, :], other=0.0)
    lse = tl.load(lse_ptr + t * H + head, mask=inside < HEADS, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + t * H + head, mask=inside < HEADS, other=0.0)
    for start in tl.range(0, count, BN):
        offsets = start + tl.arange(0, BN)
        key = keys_at(index_ptr, offsets, COUNT, first, last, BLOCK)
        seen = key >= 0
        # A slot without a key reads key 0: what it gives is masked below, and meets no other value before.
        row = tl.where(seen, key, 0).to(tl.int64)
        kn = load_rows(kn_ptr + g * kn_head, row * kn_row, columns, DN, PN)
        s = tl.zeros([BH, BN], tl.float32)
        if DR > 0:
            kr = load_rows(kr_ptr + g * kr_head, row * kr_row, rotated, DR, PR)
            s = product(qr, kr, s, PR)
        s = product(qn, kn, s, PN)
        if SHARED:
            v = kn
        else:
            v = load_rows(v_ptr + g * v_head, row * v_row, wide, DV, PV)
        dp = product(do, v, tl.zeros([BH, BN], tl.float32), PV)
        p = tl.where(seen[None, :], tl.exp2(s * (scale * LOG2_E) - lse[:, None]), 0.0)
        ds = tl.where(seen[None, :], p * (dp - delta[:, None]) * scale, 0.0)
        stored = (c * H + head)[:, None] * E + offsets[None, :]
        tl.store(p_ptr + stored, p.to(kn.dtype), mask=live)
        tl.store(ds_ptr + stored, ds.to(kn.dtype), mask=live)


@triton.jit
def queries_kernel(
    kn_ptr, kr_ptr, index_ptr, bounds_ptr, ds_ptr, dqn_ptr, dqr_ptr, start_token, COUNT, COLUMNS, KEYS, H, G, E, kn_row,
    kn_head, kr_row, kr_head, HEADS: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, PN: tl.constexpr,
    PR: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """dQ = dS · K of the queries from ``start_token`` on: a pass of its own, for P, dS and dQ together spill."""
    blocks: tl.constexpr = (HEADS + BH - 1) // BH
    pid = tl.program_id(0)
    c = (pid // (blocks * G)).to(tl.int64)
    t = c + start_token
    g = (pid // blocks % G).to(tl.int64)
    inside = pid % blocks * BH + tl.arange(0, BH)
    head = g * HEADS + inside
    live = (inside < HEADS)[:, None]
    columns, rotated = tl.arange(0, PN), tl.arange(0, PR)
    first, last = visible(bounds_ptr, t, KEYS, BOUNDED)
    index_ptr += (t * G + g) * COLUMNS
    count, spare = filled(index_ptr, COUNT, first, last, BLOCK, POSITIONS)
    accn = tl.zeros([BH, PN], tl.float32)
    if DR > 0:
        accr = tl.zeros([BH, PR], tl.float32)
    for start in tl.range(0, count, BN):
        offsets = start + tl.arange(0, BN)
        key = keys_at(index_ptr, offsets, COUNT, first, last, BLOCK)
        row = tl.where(key >= 0, key, spare).to(tl.int64)
        # Tiles are as wide as those that stored dS, so all that is read was written: 0 where there is no key.
        ds = tl.load(ds_ptr + (c * H + head)[:, None] * E + offsets[None, :], mask=live, other=0.0)
        kn = load_rows(kn_ptr + g * kn_head, row * kn_row, columns, DN, PN)
        accn = tl.dot(ds, kn, accn, input_precision="ieee")
        if DR > 0:
            kr = load_rows(kr_ptr + g * kr_head, row * kr_row, rotated, DR, PR)
            accr = tl.dot(ds, kr, accr, input_precision="ieee")
    rows = (t * H + head)[:, None]
    kind = dqn_ptr.dtype.element_ty
    tl.store(dqn_ptr + rows * DN + columns[None, :], accn.to(kind), mask=live & (columns < DN)[None, :])
    if DR > 0:
        tl.store(dqr_ptr + rows * DR + rotated[None, :], accr.to(kind), mask=live & (rotated < DR)[None, :])


@triton.jit
def contributions_kernel(
    a_ptr, x_ptr, b_ptr, y_ptr, index_ptr, bounds_ptr, place_ptr, out_ptr, start_token, COUNT, COLUMNS, KEYS, H, G, E,
    x_token, x_head, y_token, y_head, W, column, WIDTH, HEADS: tl.constexpr, PARTS: tl.constexpr, CW: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr, BOUNDED: tl.constexpr,
    SECOND: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Columns ``column`` .. + ``WIDTH`` of each pair's gradient: Σ over heads of aᵀ·x (+ bᵀ·y), a and b of [C, H, E].

    One program a query, key head and part of ``CW`` columns. ``SORTED``: row ``place[pair]`` of out is stored; else the
    key's row gets it by atomics.
    """
    pid = tl.program_id(0)
    c = (pid // (PARTS * G)).to(tl.int64)
    t = c + start_token
    g = (pid // PARTS % G).to(tl.int64)
    columns = pid % PARTS * CW + tl.arange(0, CW)
    live = (columns < WIDTH)[None, :]
    heads = tl.arange(0, BH)
    first, last = visible(bounds_ptr, t, KEYS, BOUNDED)
    index_ptr += (t * G + g) * COLUMNS
    count, _ = filled(index_ptr, COUNT, first, last, BLOCK, POSITIONS)
    if HEADS <= BH:
        all_heads = g * HEADS + heads[:, None]
        all_real = (heads < HEADS)[:, None] & live
        x = tl.load(x_ptr + t * x_token + all_heads * x_head + columns[None, :], mask=all_real, other=0.0)
        if SECOND:
            y = tl.load(y_ptr + t * y_token + all_heads * y_head + columns[None, :], mask=all_real, other=0.0)
    for start in tl.range(0, count, BN):
        offsets = start + tl.arange(0, BN)
        key = keys_at(index_ptr, offsets, COUNT, first, last, BLOCK)
        seen = key >= 0
        acc = tl.zeros([BN, CW], tl.float32)
        for inside in tl.static_range(0, HEADS, BH):
            head = g * HEADS + inside + heads[:, None]
            real = (inside + heads < HEADS)[:, None]
            stored = (c * H + head) * E + offsets[None, :]
            a = tl.load(a_ptr + stored) if HEADS % BH == 0 else tl.load(a_ptr + stored, mask=real, other=0.0)
            if HEADS > BH:
                x = tl.load(x_ptr + t * x_token + head * x_head + columns[None, :], mask=real & live, other=0.0)
            acc = tl.dot(a.T, x, acc, input_precision="ieee")
            if SECOND:
                b = tl.load(b_ptr + stored) if HEADS % BH == 0 else tl.load(b_ptr + stored, mask=real, other=0.0)
                if HEADS > BH:
                    y = tl.load(y_ptr + t * y_token + head * y_head + columns[None, :], mask=real & live, other=0.0)
                acc = tl.dot(b.T, y, acc, input_precision="ieee")
        mask = seen[:, None] & live
        if SORTED:
            row = tl.load(place_ptr + (c * G + g) * COUNT + offsets, mask=seen, other=0)
            at = out_ptr + row[:, None] * W + column + columns[None, :]
            tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            row = tl.where(seen, key, 0).to(tl.int64) * G + g
            tl.atomic_add(out_ptr + row[:, None] * W + column + columns[None, :], acc, mask=mask, sem="relaxed")


@triton.jit
def sums_kernel(
    rows_ptr, ends_ptr, out_ptr, WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """``out[key] += Σ`` of the stored rows of a key, in their order; one program a key, so no other adds to its row.

    Columns are the first ``MAIN``, a power of two, and a tile of ``REST`` for the others: 576 = 512 + 64.
    """
    key = tl.program_id(0).to(tl.int64)
    start, end = tl.load(ends_ptr + key), tl.load(ends_ptr + key + 1)
    main, rest = tl.arange(0, MAIN), MAIN + tl.arange(0, REST)
    a, b = tl.zeros([ROWS, MAIN], tl.float32), tl.zeros([ROWS, REST], tl.float32)
    for at in tl.range(start, end, ROWS):
        row = at + tl.arange(0, ROWS)
        real = (row < end)[:, None]
        place = rows_ptr + tl.cast(row, tl.int64)[:, None] * WIDTH
        a += tl.load(place + main[None, :], mask=real, other=0.0).to(tl.float32)
        if WIDTH > MAIN:
            b += tl.load(place + rest[None, :], mask=real & (rest < WIDTH)[None, :], other=0.0).to(tl.float32)
    if end > start:
        out = out_ptr + key * WIDTH
        tl.store(out + main, tl.load(out + main) + tl.sum(a, 0))
        if WIDTH > MAIN:
            mask = rest < WIDTH
            tl.store(out + rest, tl.load(out + rest, mask=mask, other=0.0) + tl.sum(b, 0), mask=mask)


@triton.jit
def blocks_kernel(
    a_ptr, x_ptr, b_ptr, y_ptr, pairs_ptr, ends_ptr, out_ptr, start_token, ENTRIES, KEYS, BLOCKS, H, G, E, x_token,
    x_head, y_token, y_head, W, column, WIDTH, HEADS: tl.constexpr, PARTS: tl.constexpr, CW: tl.constexpr,
    BH: tl.constexpr, BLOCK: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """A block of keys gets its whole sum over the queries of this run that selected it, in their order; no atomics."""
    pid = tl.program_id(0)
    owner = pid // PARTS
    g = (owner // BLOCKS).to(tl.int64)
    columns = pid % PARTS * CW + tl.arange(0, CW)
    live = (columns < WIDTH)[None, :]
    heads, rows = tl.arange(0, BH), tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, CW], tl.float32)
    start, end = tl.load(ends_ptr + owner), tl.load(ends_ptr + owner + 1)
    for at in tl.range(start, end):
        pair = tl.load(pairs_ptr + at)
        c, slot = pair // (G * ENTRIES), pair % ENTRIES
        t = c + start_token
        for inside in tl.static_range(0, HEADS, BH):
            head = g * HEADS + inside + heads
            mask = (inside + heads < HEADS)[:, None]
            stored = (c * H + head)[:, None] * E + slot * BLOCK + rows[None, :]
            x_at = x_ptr + t * x_token + head[:, None] * x_head + columns[None, :]
            a = tl.load(a_ptr + stored, mask=mask, other=0.0)
            x = tl.load(x_at, mask=mask & live, other=0.0)
            acc = tl.dot(a.T, x, acc, input_precision="ieee")
            if SECOND:
                y_at = y_ptr + t * y_token + head[:, None] * y_head + columns[None, :]
                b = tl.load(b_ptr + stored, mask=mask, other=0.0)
                y = tl.load(y_at, mask=mask & live, other=0.0)
                acc = tl.dot(b.T, y, acc, input_precision="ieee")
    if end > start:
        key = owner % BLOCKS * BLOCK + rows
        place = out_ptr + (tl.cast(key, tl.int64) * G + g)[:, None] * W + column + columns[None, :]
        mask = (key < KEYS)[:, None] & live
        tl.store(place, tl.load(place, mask=mask, other=0.0) + acc, mask=mask)
