# mypy: disable-error-code="no-untyped-def"
"""The low-rank side of the grouped products: shrink of rows to the rank, and the adapters' gradients.

Legend: R rows, E experts, N width, r rank, RP rank rounded up to a power of two, K slots a token.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _columns_of(x_at, a_at, n, columns, ranks, N, RANK, a_stride_n):
    """Tiles ``x [BR, BN]`` and ``a [BN, RP]`` of the columns from ``n``; zeros past N and past the rank."""
    inside = n + columns < N
    x = tl.load(x_at + n, mask=inside[None, :], other=0.0)
    a_at = a_at + (n + columns).to(tl.int64)[:, None] * a_stride_n
    return x, tl.load(a_at, mask=inside[:, None] & (ranks < RANK)[None, :], other=0.0)


@triton.jit(do_not_specialize=["SLOTS"])
def shrink_kernel(
    x_ptr, a_ptr, z_ptr, entry_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr, scaling, N, RANK, SLOTS,
    a_stride_n, a_stride_r, GATHER: tl.constexpr, INNER: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    RP: tl.constexpr,
):  # fmt: skip
    """``z [R, r] = scaling · x A`` with A [E, N, r] in any stride order; x rows gathered or contiguous.

    With ``INNER`` > 0, sums of that many steps are added to the outer sum (see ``adapter_grad_kernel``).
    """
    tile = tl.program_id(0)
    if tile < tl.load(tiles_ptr):
        expert = tl.load(expert_ptr + tile).to(tl.int64)
        first = tl.load(first_ptr + tile) + tl.program_id(1) * BR
        last = tl.load(last_ptr + tile)
        if first < last:
            rows = first + tl.arange(0, BR)
            live = rows < last
            if GATHER:
                at = (tl.load(entry_ptr + rows, mask=live, other=0) // SLOTS).to(tl.int64)
            else:
                at = tl.where(live, rows, first).to(tl.int64)
            ranks, columns = tl.arange(0, RP), tl.arange(0, BN)
            x_at = x_ptr + at[:, None] * N + columns[None, :]
            a_at = a_ptr + expert * N * RANK + ranks[None, :] * a_stride_r
            acc = tl.zeros([BR, RP], tl.float32)
            if INNER > 0:
                for outer in tl.range(0, N, BN * INNER):
                    part = tl.zeros([BR, RP], tl.float32)
                    for n in tl.range(outer, tl.minimum(outer + BN * INNER, N), BN):
                        x, a = _columns_of(x_at, a_at, n, columns, ranks, N, RANK, a_stride_n)
                        part = tl.dot(x, a, part, input_precision="ieee")
                    acc += part
            else:
                for n in tl.range(0, N, BN):
                    x, a = _columns_of(x_at, a_at, n, columns, ranks, N, RANK, a_stride_n)
                    acc = tl.dot(x, a, acc, input_precision="ieee")
            z = (acc * scaling).to(z_ptr.dtype.element_ty)
            z_at = z_ptr + rows.to(tl.int64)[:, None] * RANK + ranks[None, :]
            tl.store(z_at, z, mask=live[:, None] & (ranks < RANK)[None, :])


@triton.jit
def _rows_of(
    q_ptr, p_ptr, entry_ptr, weights_ptr, start, last, columns, N, RANK, SLOTS,
    GATHER: tl.constexpr, WEIGHTED: tl.constexpr, BR: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Tiles ``q [BR, BN]`` and ``p [BR, RP]`` of the rows from ``start``; zeros from ``last`` on."""
    ranks, rows = tl.arange(0, RP), start + tl.arange(0, BR)
    live = rows < last
    at = rows.to(tl.int64)
    p = tl.load(p_ptr + at[:, None] * RANK + ranks[None, :], mask=live[:, None] & (ranks < RANK)[None, :], other=0.0)
    if GATHER or WEIGHTED:
        entry = tl.load(entry_ptr + rows, mask=live, other=0)
        if WEIGHTED:
            weight = tl.load(weights_ptr + entry, mask=live, other=0.0).to(tl.float32)
            p = (p.to(tl.float32) * weight[:, None]).to(p_ptr.dtype.element_ty)
        if GATHER:
            at = (entry // SLOTS).to(tl.int64)
    q = tl.load(q_ptr + at[:, None] * N + columns[None, :], mask=live[:, None] & (columns < N)[None, :], other=0.0)
    return q, p


@triton.jit
def _adapter_grad(
    q_ptr, p_ptr, out_ptr, entry_ptr, weights_ptr, offsets_ptr, block, expert, N, RANK, SLOTS, o_stride_n, o_stride_r,
    GATHER: tl.constexpr, WEIGHTED: tl.constexpr, INNER: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    RP: tl.constexpr,
):  # fmt: skip
    """Columns ``block · BN`` on of one expert's ``out [N, r] = Σ_rows q[row, n] · p[row, r]``, in order of rows.

    p is multiplied by the row's routing weight where asked. An expert without rows gets zeros. With ``INNER`` > 0,
    sums of that many steps are added to the outer sum: one fp32 chain over all rows would round at its own size.
    """
    first, last = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    columns, ranks = block * BN + tl.arange(0, BN), tl.arange(0, RP)
    acc = tl.zeros([BN, RP], tl.float32)
    if INNER > 0:
        for outer in tl.range(first, last, BR * INNER):
            part = tl.zeros([BN, RP], tl.float32)
            for start in tl.range(outer, tl.minimum(outer + BR * INNER, last), BR):
                q, p = _rows_of(q_ptr, p_ptr, entry_ptr, weights_ptr, start, last, columns, N, RANK, SLOTS, GATHER,
                                WEIGHTED, BR, RP)  # fmt: skip
                part = tl.dot(q.T, p, part, input_precision="ieee")
            acc += part
    else:
        for start in tl.range(first, last, BR):
            q, p = _rows_of(q_ptr, p_ptr, entry_ptr, weights_ptr, start, last, columns, N, RANK, SLOTS, GATHER,
                            WEIGHTED, BR, RP)  # fmt: skip
            acc = tl.dot(q.T, p, acc, input_precision="ieee")
    out = (
        out_ptr
        + tl.cast(expert, tl.int64) * N * RANK
        + columns.to(tl.int64)[:, None] * o_stride_n
        + ranks[None, :] * o_stride_r
    )
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(columns < N)[:, None] & (ranks < RANK)[None, :])


@triton.jit(do_not_specialize=["SLOTS"])
def adapter_grad_kernel(
    q_ptr, p_ptr, out_ptr, entry_ptr, weights_ptr, offsets_ptr, N, RANK, SLOTS, o_stride_n, o_stride_r,
    GATHER: tl.constexpr, WEIGHTED: tl.constexpr, INNER: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    RP: tl.constexpr,
):  # fmt: skip
    """One factor's gradient: ``out [E, N, r]`` in any stride order."""
    _adapter_grad(q_ptr, p_ptr, out_ptr, entry_ptr, weights_ptr, offsets_ptr, tl.program_id(0), tl.program_id(1), N,
                  RANK, SLOTS, o_stride_n, o_stride_r, GATHER, WEIGHTED, INNER, BR, BN, RP)  # fmt: skip


@triton.jit(do_not_specialize=["SLOTS"])
def adapter_pair_kernel(
    x_ptr, t_ptr, a_out_ptr, d_ptr, z_ptr, b_out_ptr, entry_ptr, weights_ptr, offsets_ptr, K, N, RANK, SLOTS,
    GATHER_X: tl.constexpr, GATHER_D: tl.constexpr, WEIGHTED: tl.constexpr, INNER: tl.constexpr, BR: tl.constexpr,
    BN: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Both factors' gradients of one adapter: ``da [E, r, K] = Σ t ⊗ x`` and ``db [E, N, r] = Σ d ⊗ z``.

    The first cdiv(K, BN) programs of an expert make da, the others db: what ``adapter_grad_kernel`` gives, bit for
    bit, in one launch for two.
    """
    blocks, block = tl.cdiv(K, BN), tl.program_id(0)
    if block < blocks:
        _adapter_grad(x_ptr, t_ptr, a_out_ptr, entry_ptr, weights_ptr, offsets_ptr, block, tl.program_id(1), K, RANK,
                      SLOTS, 1, K, GATHER_X, WEIGHTED, INNER, BR, BN, RP)  # fmt: skip
    else:
        _adapter_grad(d_ptr, z_ptr, b_out_ptr, entry_ptr, weights_ptr, offsets_ptr, block - blocks, tl.program_id(1), N,
                      RANK, SLOTS, RANK, 1, GATHER_D, WEIGHTED, INNER, BR, BN, RP)  # fmt: skip
