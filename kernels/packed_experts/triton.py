# mypy: disable-error-code="no-untyped-def"
"""The forward products of an expert MLP with packed frozen weights, decoded inside the loop.

- ``packed_gate_up_kernel``: x → gate, up → h = act(gate, up);
- ``packed_rows_kernel``: h → y.

Both run along the packed dim: one scale a weight row and step. The backward's run across it (``backward_triton``).

One program makes one tile of up to ``BA + BB`` rows of one expert times ``BN`` weight columns. Weights are the M
side of the matrix units: their bytes come through three-dimensional descriptors [E, ., .] and are decoded straight
into the registers that the matrix units read, so no dequantised weight is ever written. Rows are the N side, in two
pieces, since a piece must be a power of two. One kernel holds one pair of pieces: several would keep each other's
addresses in registers, and spill.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank, N columns and K depth of
a product. ``MX``: MXFP4, else fp8 with 128 × 128 scales.

All sizes of the model are compile-time constants. With a loop bound of unknown value there is a path that skips the
loop, where the accumulators are set to zero by moves; ptxas then serialises every matrix instruction (C7515).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.grouped_lora_mlp.activation import activate
from shardwright.kernels.packed_experts.decode import decode_fp8, decode_mxfp4, high_scale, low_scale

STEP_DEPTH = tl.constexpr(64)
"""Depth of a step along the packed dim: one block of MXFP4."""
HALF = tl.constexpr(32)
"""Values that share a scale in MXFP4, and distance between a byte's two values."""
SCALE_BLOCK = tl.constexpr(128)
"""Rows and columns that share a scale in fp8."""


@triton.jit
def tile_of(tiles, columns, GROUP: tl.constexpr):
    """Program → (row tile, column tile): ``GROUP`` row tiles share a weight tile before the next column."""
    program = tl.program_id(0)
    group = program // (GROUP * columns)
    first = group * GROUP
    size = tl.minimum(tiles - first, GROUP)
    inside = program % (GROUP * columns)
    return first + inside % size, inside // size


@triton.jit
def _inside(n, N: tl.constexpr, BN: tl.constexpr):
    """Which of the columns ``n [BN]`` exist; known at compile time where BN divides N."""
    if N % BN == 0:
        return tl.full([BN], 1, tl.int1)
    else:
        return n < N


@triton.jit
def settled(acc, ASM: tl.constexpr):
    """``acc`` once every product on it has ended.

    The matrix units read decoded weights out of registers while the program runs on, and triton 3.6 waits for sums
    and shared memory only: without this the next step's bytes can land in registers that are still being read
    (seen on an H200 as NaN). An empty instruction that takes and gives the sums makes the program wait.
    """
    if ASM:
        return tl.inline_asm_elementwise("", "=r,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return acc


@triton.jit
def row_scales(s_ptr, expert, row, live, k, N, K, MX: tl.constexpr):
    """What scales weight rows ``row`` at depth ``k``: pairs of codes [E, K/64, N], or fp32 [E, N/128, K/128]."""
    if MX:
        base = s_ptr + (expert.to(tl.int64) * (K // STEP_DEPTH) + k // STEP_DEPTH) * N
        return tl.load(base + row, mask=live & (k < K), other=0)
    else:
        at = expert.to(tl.int64) * (N // SCALE_BLOCK) + row // SCALE_BLOCK
        return tl.load(s_ptr + at * (K // SCALE_BLOCK) + k // SCALE_BLOCK, mask=live & (k < K), other=0.0)


@triton.jit
def _forward_weight(desc, expert, n, k, scale, BN: tl.constexpr, MX: tl.constexpr, ASM: tl.constexpr):
    """Weight rows n .. n+BN at depths k .. k+64 as a bf16 tile [BN, 64]."""
    if MX:
        packed = desc.load([expert, n, k // 2]).reshape(BN, HALF)
        low, high = decode_mxfp4(packed, low_scale(scale)[:, None], high_scale(scale)[:, None], ASM)
        return tl.join(low, high).permute(0, 2, 1).reshape(BN, STEP_DEPTH)
    else:
        return decode_fp8(desc.load([expert, n, k]).reshape(BN, STEP_DEPTH), scale[:, None])


@triton.jit
def _low_rank(acc, z_ptr, b_ptr, expert, rows, last, at, live, width, RANK, b_stride_n, b_stride_r, RP: tl.constexpr):
    """Add ``B z`` to ``acc [BN, rows]``: rows ``at`` (where ``live``) of B [E, width, RANK], in any stride order."""
    ranks = tl.arange(0, RP)
    z = tl.load(
        z_ptr + rows.to(tl.int64)[:, None] * RANK + ranks[None, :],
        mask=(rows < last)[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )
    b_at = b_ptr + expert.to(tl.int64) * width * RANK + at.to(tl.int64)[:, None] * b_stride_n
    b = tl.load(b_at + ranks[None, :] * b_stride_r, mask=live[:, None] & (ranks < RANK)[None, :], other=0.0)
    return tl.dot(b, z.T, acc)


@triton.jit
def _biased(acc, bias_ptr, expert, at, live, width):
    """``acc [BN, rows]`` plus entries ``at`` (where ``live``) of the expert's row of a bias [E, width]."""
    bias = tl.load(bias_ptr + expert.to(tl.int64) * width + at, mask=live, other=0.0)
    return acc + bias.to(tl.float32)[:, None]


@triton.jit
def _store_rows(pointer, value, rows, last, at, live, stride):
    """Store ``value [BN, rows]`` as rows of a [R, .] tensor, in columns ``at`` where ``live``.

    ``at`` must be plain sums of ranges: a choice inside it would hide that columns are neighbours, and every value
    would leave in a store of its own.
    """
    to = pointer + rows.to(tl.int64)[:, None] * stride + at[None, :]
    tl.store(to, tl.trans(value).to(pointer.dtype.element_ty), mask=(rows < last)[:, None] & live[None, :])


@triton.jit
def _finish_gate_up(
    g, u, gu_ptr, h_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last, n, live, I: tl.constexpr, F: tl.constexpr,
    RANK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, P2: tl.constexpr, GATED: tl.constexpr, SAVE: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Adapter, bias, saved pre-activations, activation, h. Gate columns are n·STEP; up columns lie I later, or 1."""
    rows = first + tl.arange(0, ROWS)
    up = 1 if STEP == 2 else I
    if LORA:
        g = _low_rank(g, z_ptr, b_ptr, expert, rows, last, n * STEP, live, F, RANK, RANK, 1, RP)
        if GATED:
            u = _low_rank(u, z_ptr, b_ptr, expert, rows, last, n * STEP + up, live, F, RANK, RANK, 1, RP)
    if BIAS:
        g = _biased(g, bias_ptr, expert, n * STEP, live, F)
        if GATED:
            u = _biased(u, bias_ptr, expert, n * STEP + up, live, F)
    if SAVE:
        _store_rows(gu_ptr, g, rows, last, n * STEP, live, F)
        if GATED:
            _store_rows(gu_ptr, u, rows, last, n * STEP + up, live, F)
    _store_rows(h_ptr, activate(g, u, KIND, P0, P1, P2), rows, last, n, live, I)


@triton.jit
def _gate_up_tile(
    xa_desc, xb_desc, gate_desc, up_desc, s_ptr, gu_ptr, h_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last, column,
    H: tl.constexpr, I: tl.constexpr, F: tl.constexpr, RANK: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
    BN: tl.constexpr, MX: tl.constexpr, ASM: tl.constexpr,
    STEP: tl.constexpr, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    GATED: tl.constexpr, SAVE: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    ga = tl.zeros([BN, BA], tl.float32)
    ua = tl.zeros([BN, BA], tl.float32)
    if BB > 0:
        gb = tl.zeros([BN, BB], tl.float32)
        ub = tl.zeros([BN, BB], tl.float32)
    n0 = column * BN
    n = n0 + tl.arange(0, BN)
    gate_row = n * STEP
    up_row = n * STEP + (1 if STEP == 2 else I)
    live = _inside(n, I, BN)
    gate_scale = row_scales(s_ptr, expert, gate_row, live, 0, F, H, MX)
    for k in tl.range(0, H, STEP_DEPTH):
        # Scales fly while the matrix units work: the up half's behind this step's gate, the gate's a step ahead.
        if GATED:
            up_scale = row_scales(s_ptr, expert, up_row, live, k, F, H, MX)
        gate_next = row_scales(s_ptr, expert, gate_row, live, k + STEP_DEPTH, F, H, MX)
        xa = xa_desc.load([first, k]).T
        gate = _forward_weight(gate_desc, expert, n0, k, gate_scale, BN, MX, ASM)
        ga = tl.dot(gate, xa, ga)
        if BB > 0:
            xb = xb_desc.load([first + BA, k]).T
            gb = tl.dot(gate, xb, gb)
        if GATED:
            up = _forward_weight(up_desc, expert, n0, k, up_scale, BN, MX, ASM)
            ua = tl.dot(up, xa, ua)
            if BB > 0:
                ub = tl.dot(up, xb, ub)
        ga = settled(ga, ASM)
        if BB > 0:
            gb = settled(gb, ASM)
        if GATED:
            ua = settled(ua, ASM)
            if BB > 0:
                ub = settled(ub, ASM)
        gate_scale = gate_next
    # The copies' barriers are unmade by one thread; the memory they lie in may be used again only after that.
    tl.debug_barrier()
    # The small piece leaves first, so that registers are free when the large one is stored.
    if BB > 0:
        _finish_gate_up(gb, ub, gu_ptr, h_ptr, z_ptr, b_ptr, bias_ptr, expert, first + BA, last, n, live, I, F, RANK,
                        BB, STEP, KIND, P0, P1, P2, GATED, SAVE, LORA, RP, BIAS)  # fmt: skip
    last_a = tl.minimum(last, first + BA)
    _finish_gate_up(ga, ua, gu_ptr, h_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last_a, n, live, I, F, RANK,
                    BA, STEP, KIND, P0, P1, P2, GATED, SAVE, LORA, RP, BIAS)  # fmt: skip


@triton.jit
def packed_gate_up_kernel(
    xa_desc, xb_desc, gate_desc, up_desc, s_ptr, gu_ptr, h_ptr, z_ptr, b_ptr, expert_ptr, first_ptr, last_ptr,
    tiles_ptr, bias_ptr, H: tl.constexpr, I: tl.constexpr, F: tl.constexpr, RANK: tl.constexpr, BA: tl.constexpr,
    BB: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
    MX: tl.constexpr, ASM: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    P2: tl.constexpr, GATED: tl.constexpr, SAVE: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """``h [R, I]`` and, with ``SAVE``, the pre-activations ``gu [R, F]`` in the weight's own column order."""
    tiles, columns = tl.load(tiles_ptr), tl.cdiv(I, BN)
    if tl.program_id(0) >= tiles * columns:
        return
    tile, column = tile_of(tiles, columns, GROUP)
    expert, first, last = tl.load(expert_ptr + tile), tl.load(first_ptr + tile), tl.load(last_ptr + tile)
    _gate_up_tile(xa_desc, xb_desc, gate_desc, up_desc, s_ptr, gu_ptr, h_ptr, z_ptr, b_ptr, bias_ptr, expert, first,
                  last, column, H, I, F, RANK, BA, BB, BN, MX, ASM, STEP, KIND, P0, P1, P2, GATED, SAVE,
                  LORA, RP, BIAS)  # fmt: skip


@triton.jit
def finish_rows(
    acc, y_ptr, z_ptr, b_ptr, expert, first, last, n, at, N, RANK, b_stride_n, b_stride_r, stride, ROWS: tl.constexpr,
    LORA: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Adapter and store: weight column ``n`` of ``N`` goes to column ``at`` of rows that are ``stride`` apart."""
    rows = first + tl.arange(0, ROWS)
    if LORA:
        acc = _low_rank(acc, z_ptr, b_ptr, expert, rows, last, n, n < N, N, RANK, b_stride_n, b_stride_r, RP)
    _store_rows(y_ptr, acc, rows, last, at, n < N, stride)


@triton.jit
def _along_tile(
    xa_desc, xb_desc, w_desc, s_ptr, y_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last, column, N: tl.constexpr,
    K: tl.constexpr, RANK: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, MX: tl.constexpr,
    ASM: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One tile of a product along the packed dim."""
    acc_a = tl.zeros([BN, BA], tl.float32)
    if BB > 0:
        acc_b = tl.zeros([BN, BB], tl.float32)
    n0 = column * BN
    n = n0 + tl.arange(0, BN)
    live = _inside(n, N, BN)
    scale = row_scales(s_ptr, expert, n, live, 0, N, K, MX)
    for k in tl.range(0, K, STEP_DEPTH):
        after = row_scales(s_ptr, expert, n, live, k + STEP_DEPTH, N, K, MX)
        w = _forward_weight(w_desc, expert, n0, k, scale, BN, MX, ASM)
        acc_a = tl.dot(w, xa_desc.load([first, k]).T, acc_a)
        if BB > 0:
            acc_b = tl.dot(w, xb_desc.load([first + BA, k]).T, acc_b)
        acc_a = settled(acc_a, ASM)
        if BB > 0:
            acc_b = settled(acc_b, ASM)
        scale = after
    # The copies' barriers are unmade by one thread; the memory they lie in may be used again only after that.
    tl.debug_barrier()
    if BIAS:
        acc_a = _biased(acc_a, bias_ptr, expert, n, live, N)
        if BB > 0:
            acc_b = _biased(acc_b, bias_ptr, expert, n, live, N)
    if BB > 0:
        finish_rows(acc_b, y_ptr, z_ptr, b_ptr, expert, first + BA, last, n, n, N, RANK, RANK, 1, N, BB, LORA, RP)
    last_a = tl.minimum(last, first + BA)
    finish_rows(acc_a, y_ptr, z_ptr, b_ptr, expert, first, last_a, n, n, N, RANK, RANK, 1, N, BA, LORA, RP)


@triton.jit
def packed_rows_kernel(
    xa_desc, xb_desc, w_desc, s_ptr, y_ptr, z_ptr, b_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr, bias_ptr,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr,
    GROUP: tl.constexpr, MX: tl.constexpr,
    ASM: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """``y [R, N] = x [R, K] Wᵀ (+ z Bᵀ) (+ bias [E, N])`` for W [E, N, K] packed along K."""
    tiles, columns = tl.load(tiles_ptr), tl.cdiv(N, BN)
    if tl.program_id(0) >= tiles * columns:
        return
    tile, column = tile_of(tiles, columns, GROUP)
    expert, first, last = tl.load(expert_ptr + tile), tl.load(first_ptr + tile), tl.load(last_ptr + tile)
    _along_tile(xa_desc, xb_desc, w_desc, s_ptr, y_ptr, z_ptr, b_ptr, bias_ptr, expert, first, last, column, N, K,
                RANK, BA, BB, BN, MX, ASM, LORA, RP, BIAS)  # fmt: skip
