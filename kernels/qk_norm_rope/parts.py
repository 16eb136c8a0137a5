# mypy: disable-error-code="no-untyped-def"
"""How a row lies in memory and in registers: two halves that turn together, the rest beside them, and its tables.

A row is one head of one token. Both pairings load and store whole vectors. ``load_parts`` and ``store_parts`` are
opposites, with fp32 between them.

Legend: T tokens of a batch row, D head width, W rotary width; ``HALF`` and ``PASS`` are the tile widths of half
the rotating and of the unchanged dimensions (0 where none); ``sb, st, sh`` strides of batch, token, head.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_parts(
    ptr, start, live, D: tl.constexpr, W: tl.constexpr, LAST: tl.constexpr, SPLIT: tl.constexpr, HALF: tl.constexpr,
    PASS: tl.constexpr,
):  # fmt: skip
    """The two halves ``[ROWS, HALF]`` that turn together and the rest ``[ROWS, PASS]`` of rows, in fp32."""
    turn: tl.constexpr = D - W if LAST else 0
    keep: tl.constexpr = 0 if LAST else W
    if SPLIT:
        both = tl.arange(0, 2 * HALF)
        mask = live[:, None] & (both < W)[None, :]
        pairs = tl.load(ptr + start[:, None] + (turn + both)[None, :], mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (pairs.shape[0], HALF, 2)))
    else:
        lane = tl.arange(0, HALF)
        mask = live[:, None] & (lane < W // 2)[None, :]
        at = start[:, None] + (turn + lane)[None, :]
        a = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(ptr + at + W // 2, mask=mask, other=0.0).to(tl.float32)
    if PASS > 0:
        rest = tl.arange(0, PASS)
        mask = live[:, None] & (rest < D - W)[None, :]
        p = tl.load(ptr + start[:, None] + (keep + rest)[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        p = a
    return a, b, p


@triton.jit
def store_parts(
    ptr, start, live, a, b, p, D: tl.constexpr, W: tl.constexpr, LAST: tl.constexpr, JOIN: tl.constexpr,
    HALF: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """The opposite of ``load_parts``, with one rounding."""
    turn: tl.constexpr = D - W if LAST else 0
    keep: tl.constexpr = 0 if LAST else W
    kind: tl.constexpr = ptr.dtype.element_ty
    if JOIN:
        both = tl.arange(0, 2 * HALF)
        mask = live[:, None] & (both < W)[None, :]
        pairs = tl.reshape(tl.join(a, b), (a.shape[0], 2 * HALF))
        tl.store(ptr + start[:, None] + (turn + both)[None, :], pairs.to(kind), mask=mask)
    else:
        lane = tl.arange(0, HALF)
        mask = live[:, None] & (lane < W // 2)[None, :]
        at = start[:, None] + (turn + lane)[None, :]
        tl.store(ptr + at, a.to(kind), mask=mask)
        tl.store(ptr + at + W // 2, b.to(kind), mask=mask)
    if PASS > 0:
        rest = tl.arange(0, PASS)
        mask = live[:, None] & (rest < D - W)[None, :]
        tl.store(ptr + start[:, None] + (keep + rest)[None, :], p.to(kind), mask=mask)


@triton.jit
def load_weight(
    ptr, D: tl.constexpr, W: tl.constexpr, LAST: tl.constexpr, SPLIT: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    HALF: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """A weight ``[D]`` as the three parts of one row ``[1, ...]``, in fp32, its offset of 1 added."""
    one = tl.arange(0, 1)
    a, b, p = load_parts(ptr, tl.cast(one, tl.int64), one == 0, D, W, LAST, SPLIT, HALF, PASS)
    if UNIT_OFFSET:
        a, b, p = a + 1.0, b + 1.0, p + 1.0
    return a, b, p


@triton.jit
def load_table(ptr, start, live, W: tl.constexpr, WHOLE: tl.constexpr, HALF: tl.constexpr):
    """Both halves of a table's rows in fp32; a half table, or pairs, use its first half twice."""
    lane = tl.arange(0, HALF)
    mask = live[:, None] & (lane < W // 2)[None, :]
    at = start[:, None] + lane[None, :]
    first = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = first
    if WHOLE:
        second = tl.load(ptr + at + W // 2, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def place(rows, T, heads, sb, st, sh):
    """First value of each row, 64-bit; the divisions are 32-bit."""
    token, head = rows // heads, rows % heads
    start = tl.cast(token // T, tl.int64) * sb + tl.cast(token % T, tl.int64) * st
    return start + tl.cast(head, tl.int64) * sh


@triton.jit
def square_sum(a, b, p, PASS: tl.constexpr):
    """Σ x² of each row."""
    total = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
    if PASS > 0:
        total += tl.sum(p * p, axis=1)
    return total
