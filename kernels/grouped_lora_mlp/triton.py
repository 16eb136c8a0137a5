# mypy: disable-error-code="no-untyped-def"
"""The grouped product of an expert MLP on rows sorted by expert, on any device that Triton compiles for.

``product_kernel`` makes every product of the layer: x → gate and up, h → y, dy → dh, dgate and dup → dx. One
program makes one tile of up to 192 rows of one expert times ``BN`` weight columns. Weights are the M side of
the matrix units and rows the N side: rows come in pieces of 128, 64 and 32, so an expert with few rows wastes
little. Weights stream through three-dimensional descriptors [E, ., .]: bounds hold per expert, and no address
is ever a 32-bit product. An adapter's low-rank product ``z`` has its own launch and is multiplied by B here.
``hopper.py`` makes the same products with warps that specialise; ``configs`` says which is used where.

Legend: R rows, E experts, N columns, K depth, r rank, RP rank rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def _finish(
    acc, y_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last, n, N, RANK, b_stride_n, b_stride_r, ROWS: tl.constexpr,
    LORA: tl.constexpr, BIAS: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Add ``B z`` and the bias to ``acc [BN, ROWS]`` (B is [E, N, r] in any stride order), and store it as rows."""
    rows = first + tl.arange(0, ROWS)
    live = rows < last
    if LORA:
        ranks = tl.arange(0, RP)
        z_at = z_ptr + rows.to(tl.int64)[:, None] * RANK + ranks[None, :]
        z = tl.load(z_at, mask=live[:, None] & (ranks < RANK)[None, :], other=0.0)
        b_at = b_ptr + expert.to(tl.int64) * N * RANK + n.to(tl.int64)[:, None] * b_stride_n
        b = tl.load(b_at + ranks[None, :] * b_stride_r, mask=(n < N)[:, None] & (ranks < RANK)[None, :], other=0.0)
        acc = tl.dot(b, z.T, acc, input_precision="ieee")
    if BIAS:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=n < N, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    at = y_ptr + rows.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


@triton.jit
def _product(
    x_ptr, xa_desc, xb_desc, w_desc, y_ptr, entry_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last, column, N, K, RANK,
    SLOTS, b_stride_n, b_stride_r, BA: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    INNER: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr, N_FIRST: tl.constexpr, LORA: tl.constexpr,
    BIAS: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """One tile of BA (+ BB) rows. With ``INNER`` > 0, sums of that many steps are added to the outer sums."""
    depth = tl.arange(0, BK)
    rows_a = first + tl.arange(0, BA)
    at_a = x_ptr + _tokens(entry_ptr, rows_a, last, SLOTS, GATHER)[:, None] * K + depth[None, :]
    acc_a = tl.zeros([BN, BA], tl.float32)
    if BB > 0:
        rows_b = first + BA + tl.arange(0, BB)
        at_b = x_ptr + _tokens(entry_ptr, rows_b, last, SLOTS, GATHER)[:, None] * K + depth[None, :]
        acc_b = tl.zeros([BN, BB], tl.float32)
    if INNER > 0:
        for outer in tl.range(0, K, BK * INNER):
            part_a = tl.zeros([BN, BA], tl.float32)
            if BB > 0:
                part_b = tl.zeros([BN, BB], tl.float32)
            for k in tl.range(outer, tl.minimum(outer + BK * INNER, K), BK):
                w = _weight(w_desc, expert, column * BN, k, BN, BK, N_FIRST)
                x = _input(xa_desc, at_a, first, k, K, BK, GATHER, EVEN)
                part_a = tl.dot(w, x, part_a, input_precision="ieee")
                if BB > 0:
                    x = _input(xb_desc, at_b, first + BA, k, K, BK, GATHER, EVEN)
                    part_b = tl.dot(w, x, part_b, input_precision="ieee")
            acc_a += part_a
            if BB > 0:
                acc_b += part_b
    else:
        for k in tl.range(0, K, BK):
            w = _weight(w_desc, expert, column * BN, k, BN, BK, N_FIRST)
            x = _input(xa_desc, at_a, first, k, K, BK, GATHER, EVEN)
            acc_a = tl.dot(w, x, acc_a, input_precision="ieee")
            if BB > 0:
                x = _input(xb_desc, at_b, first + BA, k, K, BK, GATHER, EVEN)
                acc_b = tl.dot(w, x, acc_b, input_precision="ieee")
    # The copies' barriers lie in memory that the epilogue uses again: no thread may still wait on them.
    tl.debug_barrier()
    n = column * BN + tl.arange(0, BN)
    # The small piece leaves first, so that registers are free when the large one is stored.
    if BB > 0:
        _finish(acc_b, y_ptr, z_ptr, b_ptr, bias_ptr, expert, first + BA, last, n, N, RANK, b_stride_n, b_stride_r, BB,
                LORA, BIAS, RP)  # fmt: skip
    last_a = tl.minimum(last, first + BA)
    _finish(acc_a, y_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last_a, n, N, RANK, b_stride_n, b_stride_r, BA, LORA,
            BIAS, RP)  # fmt: skip


@triton.jit(do_not_specialize=["SLOTS"])
def product_kernel(
    x_ptr, x128_desc, x64_desc, x32_desc, w_desc, y_ptr, entry_ptr, z_ptr, b_ptr, bias_ptr, expert_ptr, first_ptr,
    last_ptr, tiles_ptr, N, K, RANK, SLOTS, b_stride_n, b_stride_r, BN: tl.constexpr, BK: tl.constexpr,
    INNER: tl.constexpr, GROUP: tl.constexpr, GATHER: tl.constexpr, EVEN: tl.constexpr, N_FIRST: tl.constexpr,
    LORA: tl.constexpr, BIAS: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """``y [R, N] = x Wᵀ (+ z Bᵀ) (+ bias)`` for rows of x, or rows of tokens that ``entry`` names (``GATHER``)."""
    tiles, columns = tl.load(tiles_ptr), tl.cdiv(N, BN)
    if tl.program_id(0) < tiles * columns:
        tile, column = _tile(tiles, columns, GROUP)
        expert, first, last = tl.load(expert_ptr + tile), tl.load(first_ptr + tile), tl.load(last_ptr + tile)
        rows = last - first
        if rows > 160:
            _product(x_ptr, x128_desc, x64_desc, w_desc, y_ptr, entry_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last,
                     column, N, K, RANK, SLOTS, b_stride_n, b_stride_r, 128, 64, BN, BK, INNER, GATHER, EVEN,
                     N_FIRST, LORA, BIAS, RP)  # fmt: skip
        elif rows > 128:
            _product(x_ptr, x128_desc, x32_desc, w_desc, y_ptr, entry_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last,
                     column, N, K, RANK, SLOTS, b_stride_n, b_stride_r, 128, 32, BN, BK, INNER, GATHER, EVEN,
                     N_FIRST, LORA, BIAS, RP)  # fmt: skip
        elif rows > 64:
            _product(x_ptr, x128_desc, x128_desc, w_desc, y_ptr, entry_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last,
                     column, N, K, RANK, SLOTS, b_stride_n, b_stride_r, 128, 0, BN, BK, INNER, GATHER, EVEN,
                     N_FIRST, LORA, BIAS, RP)  # fmt: skip
        elif rows > 0:
            _product(x_ptr, x64_desc, x64_desc, w_desc, y_ptr, entry_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last,
                     column, N, K, RANK, SLOTS, b_stride_n, b_stride_r, 64, 0, BN, BK, INNER, GATHER, EVEN,
                     N_FIRST, LORA, BIAS, RP)  # fmt: skip
