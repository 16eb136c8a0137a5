# mypy: disable-error-code="no-untyped-def"
"""Cross-entropy over rows of logits in Triton: statistics, loss, and the gradient in place.

A program owns one row. It reads the row once for an online maximum and sum in fp32, then a second time,
backwards so that what was read last may still be in the second-level cache, and overwrites it with the
gradient. Nothing is added across rows: the result has the same bits in every run.

Legend: T rows of one chunk, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-2.0e38)
"""Start of a running maximum: finite, so that a block of -inf gives no inf - inf."""


@triton.jit(do_not_specialize=["T", "V"])
def count_targets_kernel(
    targets_ptr,
    tokens_ptr,
    counts_ptr,
    factors_ptr,
    T,
    V,
    ignore_index,
    MEAN: tl.constexpr,
    GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``counts`` = (rows that count, labels out of range, first such row, its label); ``factors`` = (m, 2⁻ᵉ).

    With n counting rows (or the number at ``tokens_ptr`` where GIVEN), 1/n = m · 2⁻ᵉ and m in (1/2, 1]: m goes
    into the 16-bit gradient of the logits, 2⁻ᵉ is applied at the end, where it is exact. Both are 1 where the
    loss is not a mean.
    """
    lanes = tl.arange(0, BLOCK)
    valid = tl.zeros([BLOCK], dtype=tl.int32)
    wrong = tl.zeros([BLOCK], dtype=tl.int32)
    first = tl.full([BLOCK], 0x7FFFFFFF, dtype=tl.int32)
    for start in tl.range(0, T, BLOCK):
        rows = start + lanes
        target = tl.load(targets_ptr + rows, mask=rows < T, other=ignore_index)
        counts = target != ignore_index
        outside = counts & ((target < 0) | (target >= V))
        valid += counts.to(tl.int32)
        wrong += outside.to(tl.int32)
        first = tl.minimum(first, tl.where(outside, rows, 0x7FFFFFFF))
    n = tl.sum(valid, axis=0)
    bad = tl.sum(wrong, axis=0)
    at = tl.min(first, axis=0)
    label = tl.load(targets_ptr + at, mask=bad > 0, other=0)
    tl.store(counts_ptr, tl.cast(n, tl.int64))
    tl.store(counts_ptr + 1, tl.cast(bad, tl.int64))
    tl.store(counts_ptr + 2, tl.cast(at, tl.int64))
    tl.store(counts_ptr + 3, label)
    if MEAN:
        if GIVEN:
            n = tl.load(tokens_ptr)
        some = tl.maximum(n.to(tl.float32), 1.0)
        exponent = (some.to(tl.int32, bitcast=True) >> 23) - 127
        power = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(factors_ptr, power / some)
        tl.store(factors_ptr + 1, 1.0 / power)
    else:
        tl.store(factors_ptr, 1.0)
        tl.store(factors_ptr + 1, 1.0)


@triton.jit
def cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    factors_ptr,
    loss_ptr,
    V,
    stride,
    ignore_index,
    GRADIENT: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``loss [T]`` (fp32) of ``logits [T, V]``; with GRADIENT the row becomes ``m · (softmax - onehot)``.

    A thread keeps the maximum and the sum of its own groups of WIDTH neighbours, so the loop needs no
    barrier. Row padding (``stride - V`` values, where PADDED) is read and overwritten but never counted.
    An ignored row has loss 0 and gradient 0. A label out of range makes its loss and its row NaN.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    BLOCK: tl.constexpr = GROUPS * WIDTH
    lanes = tl.arange(0, GROUPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    base = logits_ptr + row * stride
    dtype = logits_ptr.dtype.element_ty
    target = tl.load(targets_ptr + row)
    blocks = tl.cdiv(stride, BLOCK)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            zero = tl.zeros([GROUPS, WIDTH], dtype=dtype)
            for block in tl.range(0, blocks):
                columns = block * BLOCK + lanes
                tl.store(base + columns, zero, mask=columns < stride)
    else:
        inside = (target >= 0) & (target < V)
        picked = tl.load(base + target, mask=inside, other=float("nan")).to(tl.float32)
        largest = tl.full([GROUPS], LOWEST, dtype=tl.float32)
        total = tl.zeros([GROUPS], dtype=tl.float32)
        for block in tl.range(0, blocks):
            columns = block * BLOCK + lanes
            x = tl.load(base + columns, mask=columns < stride, other=float("-inf")).to(tl.float32)
            if PADDED:
                x = tl.where(columns < V, x, float("-inf"))
            higher = tl.maximum(largest, tl.max(x, axis=1))
            fresh = tl.sum(tl.exp2((x - higher[:, None]) * LOG2_E), axis=1)
            total = total * tl.exp2((largest - higher) * LOG2_E) + fresh
            largest = higher
        top = tl.max(largest, axis=0)
        normaliser = top + tl.log(tl.sum(total * tl.exp2((largest - top) * LOG2_E), axis=0))
        tl.store(loss_ptr + row, normaliser - picked)
        if GRADIENT:
            factor = tl.where(inside, tl.load(factors_ptr), float("nan"))
            power = tl.log2(factor)
            for step in tl.range(0, blocks):
                columns = (blocks - 1 - step) * BLOCK + lanes
                x = tl.load(base + columns, mask=columns < stride, other=float("-inf")).to(tl.float32)
                gradient = tl.exp2((x - normaliser) * LOG2_E + power)
                tl.store(base + columns, gradient.to(dtype), mask=columns < stride)
            tl.debug_barrier()
            certain = (tl.exp2((picked - normaliser) * LOG2_E) - 1.0) * factor
            tl.store(base + target, certain.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["H"])
def scale_rows_kernel(x_ptr, scale_ptr, factors_ptr, y_ptr, n, H, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """``y = x · scale · 2⁻ᵉ`` in fp32, one rounding; ``scale`` is one fp32 value, or one a row of H values."""
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if PER_ROW:
        scale = tl.load(scale_ptr + at // H, mask=mask, other=0.0)
    else:
        scale = tl.load(scale_ptr)
    y = x * (scale * tl.load(factors_ptr + 1))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
