# mypy: disable-error-code="no-untyped-def"
"""The gradient of a whole stack, for full training: one product over each expert's rows.

Legend: R rows, E experts, N and M the stack's last two dims, K slots a token.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _side(ptr, rows, live, columns, width, token, GATHER: tl.constexpr):
    """A tile of rows, gathered from tokens or contiguous; zeros outside."""
    at = token if GATHER else rows.to(tl.int64)
    return tl.load(ptr + at[:, None] * width + columns[None, :], mask=live[:, None] & (columns < width)[None, :],
                   other=0.0)  # fmt: skip


@triton.jit
def _step(
    q_ptr, p_ptr, entry_ptr, weights_ptr, start, last, n, m, N, M, SLOTS, GATHER_Q: tl.constexpr,
    GATHER_P: tl.constexpr, WEIGHT_Q: tl.constexpr, WEIGHT_P: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Tiles q [BR, BN] and p [BR, BM] of the rows from ``start``; zeros from ``last`` on."""
    rows = start + tl.arange(0, BR)
    live, token = rows < last, rows.to(tl.int64)
    if GATHER_Q or GATHER_P or WEIGHT_Q or WEIGHT_P:
        entry = tl.load(entry_ptr + rows, mask=live, other=0)
        token = (entry // SLOTS).to(tl.int64)
    q = _side(q_ptr, rows, live, n, N, token, GATHER_Q)
    p = _side(p_ptr, rows, live, m, M, token, GATHER_P)
    if WEIGHT_Q or WEIGHT_P:
        weight = tl.load(weights_ptr + entry, mask=live, other=0.0).to(tl.float32)[:, None]
        if WEIGHT_Q:
            q = (q.to(tl.float32) * weight).to(q_ptr.dtype.element_ty)
        if WEIGHT_P:
            p = (p.to(tl.float32) * weight).to(p_ptr.dtype.element_ty)
    return q, p


@triton.jit(do_not_specialize=["SLOTS"])
def stack_grad_kernel(
    q_ptr, p_ptr, out_ptr, entry_ptr, weights_ptr, offsets_ptr, N, M, SLOTS, GATHER_Q: tl.constexpr,
    GATHER_P: tl.constexpr, WEIGHT_Q: tl.constexpr, WEIGHT_P: tl.constexpr, INNER: tl.constexpr, BR: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """``out [E, N, M] = Σ_rows q[row, n] · p[row, m]`` over each expert's rows, in order of rows.

    One side is multiplied by the row's routing weight where asked. An expert without rows gets zeros: a stack's
    gradient is never what memory held before. With ``INNER`` > 0, sums of that many steps are added to the outer sum.
    """
    expert, columns = tl.program_id(1), tl.cdiv(M, BM)
    first, last = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    n = (tl.program_id(0) // columns) * BN + tl.arange(0, BN)
    m = (tl.program_id(0) % columns) * BM + tl.arange(0, BM)
    acc = tl.zeros([BN, BM], tl.float32)
    if INNER > 0:
        for outer in tl.range(first, last, BR * INNER):
            part = tl.zeros([BN, BM], tl.float32)
            for start in tl.range(outer, tl.minimum(outer + BR * INNER, last), BR):
                q, p = _step(q_ptr, p_ptr, entry_ptr, weights_ptr, start, last, n, m, N, M, SLOTS, GATHER_Q, GATHER_P,
                             WEIGHT_Q, WEIGHT_P, BR)  # fmt: skip
                part = tl.dot(q.T, p, part, input_precision="ieee")
            acc += part
    else:
        for start in tl.range(first, last, BR):
            q, p = _step(q_ptr, p_ptr, entry_ptr, weights_ptr, start, last, n, m, N, M, SLOTS, GATHER_Q, GATHER_P,
                         WEIGHT_Q, WEIGHT_P, BR)  # fmt: skip
            acc = tl.dot(q.T, p, acc, input_precision="ieee")
    out = out_ptr + tl.cast(expert, tl.int64) * N * M + n.to(tl.int64)[:, None] * M + m[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])
