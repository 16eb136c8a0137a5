# mypy: disable-error-code="no-untyped-def"
"""Forward over selected keys, portable: one program a query and block of heads of one key head.

A program walks over the positions of its query's selection in tiles; keys are loaded by their rows, once for the
score and, in the latent form, for the value too. Validity is the entry's value, not its column: -1 may stand
anywhere. A slot without a key reads a key that the row has anyway, with share 0: nothing else in memory can reach
the output, and no load needs a mask.

Programs lie on one grid axis: the others end at 65,535.

Legend: T queries, S keys, H query heads, G key heads, HEADS = H / G, DN, DR, DV widths of the plain part, the rotated
part and the value, P* those widths as powers of two, K entries, B keys of an entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
"""Start of the running maximum: finite, so that a tile without keys subtracts no infinities."""
LARGEST_SINK = tl.constexpr(2e38)


@triton.jit
def keys_at(index_ptr, positions, COUNT, first, last, BLOCK: tl.constexpr):
    """Key rows at positions of an expanded selection; -1 outside ``first <= row < last`` and past ``COUNT``."""
    inside = positions < COUNT
    if BLOCK == 1:
        key = tl.load(index_ptr + positions, mask=inside, other=-1)
    else:
        block = tl.load(index_ptr + positions // BLOCK, mask=inside, other=-1)
        key = tl.where((block >= 0) & (block < last), block * BLOCK + positions % BLOCK, -1)
    return tl.where((key >= first) & (key < last), key, -1)


@triton.jit
def visible(bounds_ptr, t, KEYS, BOUNDED: tl.constexpr):
    """First key that query ``t`` may see, and the one past its last."""
    if BOUNDED:
        first = tl.maximum(tl.load(bounds_ptr + 2 * t), 0)
        last = tl.minimum(tl.load(bounds_ptr + 2 * t + 1), KEYS)
    else:
        first, last = 0, KEYS
    return first, last


@triton.jit
def filled(index_ptr, COUNT, first, last, BLOCK: tl.constexpr, POSITIONS: tl.constexpr):
    """One past the last position that holds a key; and a key that the row has, to read where it has none."""
    positions = tl.arange(0, POSITIONS)
    key = keys_at(index_ptr, positions, COUNT, first, last, BLOCK)
    return tl.max(tl.where(key >= 0, positions + 1, 0), 0), tl.maximum(tl.max(key, 0), 0)


@triton.jit
def load_rows(ptr, row, columns, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Whole rows at element offsets ``row``; a mask only where the tile is wider than they are."""
    at = ptr + row[:, None] + columns[None, :]
    if WIDTH == PADDED:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    return found


@triton.jit
def product(a, b, acc, WIDTH: tl.constexpr):
    """``acc + a · bᵀ`` in fp32 of ``a [M, WIDTH]`` and ``b [N, WIDTH]``.

    Factors in fp32 are multiplied on no matrix unit, one column after another: summed over 512 columns at once they
    round three times as much as eager's product, so runs of 64 columns are summed first.
    """
    RUN: tl.constexpr = 64
    if a.dtype == tl.float32 and WIDTH > RUN:
        left = tl.permute(tl.reshape(a, [a.shape[0], WIDTH // RUN, RUN]), [1, 0, 2])
        right = tl.permute(tl.reshape(b, [b.shape[0], WIDTH // RUN, RUN]), [1, 2, 0])
        acc += tl.sum(tl.dot(left, right, input_precision="ieee"), 0)
    else:
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    return acc


@triton.jit
def forward_kernel(
    qn_ptr, qr_ptr, kn_ptr, kr_ptr, v_ptr, index_ptr, bounds_ptr, gate_ptr, sinks_ptr, y_ptr, o_ptr, low_ptr, lse_ptr,
    scale, COUNT, COLUMNS, KEYS, H, G, qn_token, qn_head, qr_token, qr_head, kn_row, kn_head, kr_row, kr_head, v_row,
    v_head, HEADS: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, DV: tl.constexpr, PN: tl.constexpr,
    PR: tl.constexpr, PV: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr, BOUNDED: tl.constexpr, SHARED: tl.constexpr, GATE: tl.constexpr, SINKS: tl.constexpr,
    SAVE: tl.constexpr,
):  # fmt: skip
    """``y``, ``lse``; with ``SAVE`` also the ungated output in two parts, ``o`` (where gated) and what rounding cut."""
    blocks: tl.constexpr = (HEADS + BH - 1) // BH
    pid = tl.program_id(0)
    t = (pid // (blocks * G)).to(tl.int64)
    g = (pid // blocks % G).to(tl.int64)
    inside = pid % blocks * BH + tl.arange(0, BH)
    head = g * HEADS + inside
    live = (inside < HEADS)[:, None]
    columns, rotated, wide = tl.arange(0, PN), tl.arange(0, PR), tl.arange(0, PV)
    first, last = visible(bounds_ptr, t, KEYS, BOUNDED)
    index_ptr += (t * G + g) * COLUMNS
    count, spare = filled(index_ptr, COUNT, first, last, BLOCK, POSITIONS)
    at = qn_ptr + t * qn_token + head[:, None] * qn_head + columns[None, :]
    qn = tl.load(at, mask=live & (columns < DN)[None, :], other=0.0)
    if DR > 0:
        at = qr_ptr + t * qr_token + head[:, None] * qr_head + rotated[None, :]
        qr = tl.load(at, mask=live & (rotated < DR)[None, :], other=0.0)
    top = tl.full([BH], LOWEST, tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, PV], tl.float32)
    for start in tl.range(0, count, BN):
        key = keys_at(index_ptr, start + tl.arange(0, BN), COUNT, first, last, BLOCK)
        seen = key >= 0
        row = tl.where(seen, key, spare).to(tl.int64)
        kn = load_rows(kn_ptr + g * kn_head, row * kn_row, columns, DN, PN)
        s = tl.zeros([BH, BN], tl.float32)
        if DR > 0:
            kr = load_rows(kr_ptr + g * kr_head, row * kr_row, rotated, DR, PR)
            s = product(qr, kr, s, PR)
        s = product(qn, kn, s, PN)
        s = tl.where(seen[None, :], s * (scale * LOG2_E), float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        top = higher
        if SHARED:
            v = kn
        else:
            v = load_rows(v_ptr + g * v_head, row * v_row, wide, DV, PV)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=inside < HEADS, other=0.0).to(tl.float32)
        sink = tl.where(sink > LARGEST_SINK, LARGEST_SINK, sink) * LOG2_E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
        top = higher
    safe = tl.where(total == 0, 1.0, total)
    o = acc / safe[:, None]
    lse = tl.where(total == 0, float("-inf"), (top + tl.log2(safe)) * LN_2)
    tl.store(lse_ptr + t * H + head, lse, mask=inside < HEADS)
    place = (t * H + head)[:, None] * DV + wide[None, :]
    mask = live & (wide < DV)[None, :]
    if GATE == "":
        y = o
    else:
        if GATE == "head":
            z = tl.load(gate_ptr + t * H + head, mask=inside < HEADS, other=0.0).to(tl.float32)[:, None]
        else:
            z = tl.load(gate_ptr + place, mask=mask, other=0.0).to(tl.float32)
        y = o * (1.0 / (1.0 + tl.exp2(-z * LOG2_E)))
    kind = y_ptr.dtype.element_ty
    tl.store(y_ptr + place, y.to(kind), mask=mask)
    if SAVE:
        rounded = o.to(kind)
        if GATE != "":
            tl.store(o_ptr + place, rounded, mask=mask)
        tl.store(low_ptr + place, (o - rounded.to(tl.float32)).to(kind), mask=mask)
