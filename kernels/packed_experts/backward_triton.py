# mypy: disable-error-code="no-untyped-def"
"""The backward's products with packed frozen weights: across the packed dim, which is their output.

- ``packed_activation_bwd_kernel``: dy → dh → dgate, dup;
- ``packed_dx_kernel``: dgate_up → dx.

The low and high nibbles of a block are output columns 32 apart with an accumulator each; scales lie along the columns.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank, N columns and K depth of
a product. ``MX``: MXFP4, else fp8 with 128 × 128 scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.grouped_lora_mlp.activation import activate_bwd
from shardwright.kernels.packed_experts.decode import decode_fp8, decode_mxfp4, high_scale, low_scale
from shardwright.kernels.packed_experts.triton import HALF, SCALE_BLOCK, STEP_DEPTH, finish_rows, settled, tile_of


@triton.jit
def _column_scales(s_ptr, expert, row, column, N, K, BK: tl.constexpr, HB: tl.constexpr, MX: tl.constexpr):
    """Scales of weight rows ``row [BK]`` for HB bytes of columns: pairs of codes [BK, HB/32], or fp32 [BK, HB/32].

    The weight is [E, K, N], packed along N; here K is the product's depth. Column c of the result scales bytes
    32c .. 32c+32: one block of MXFP4, or 32 columns of fp8.
    """
    c = tl.arange(0, HB // HALF)
    if MX:
        block = column // STEP_DEPTH + c
        at = (expert.to(tl.int64) * (N // STEP_DEPTH) + block) * K
        live = (row < K)[:, None] & (block < N // STEP_DEPTH)[None, :]
        return tl.load(s_ptr + at[None, :] + row[:, None], mask=live, other=0)
    else:
        block = (column + c * HALF) // SCALE_BLOCK
        at = (expert.to(tl.int64) * (K // SCALE_BLOCK) + row // SCALE_BLOCK) * (N // SCALE_BLOCK)
        live = (row < K)[:, None] & (block < N // SCALE_BLOCK)[None, :]
        return tl.load(s_ptr + at[:, None] + block[None, :], mask=live, other=0.0)


@triton.jit
def _spread(scale, BK: tl.constexpr, HB: tl.constexpr):
    """[BK, HB/32] → [BK, HB]."""
    return tl.broadcast_to(scale[:, :, None], (BK, HB // HALF, HALF)).reshape(BK, HB)


@triton.jit
def _across_weight(
    desc, expert, n, k, low, high, BK: tl.constexpr, HB: tl.constexpr, MX: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Weight rows k .. k+BK as two bf16 tiles [HB, BK] of output columns; ``low`` and ``high`` are their scales."""
    if MX:
        packed = desc.load([expert, k, n // 2]).reshape(BK, HB)
        a, b = decode_mxfp4(packed, _spread(low_scale(low), BK, HB), _spread(high_scale(low), BK, HB), ASM)
    else:
        a = decode_fp8(desc.load([expert, k, n]).reshape(BK, HB), _spread(low, BK, HB))
        b = decode_fp8(desc.load([expert, k, n + HB]).reshape(BK, HB), _spread(high, BK, HB))
    return a.T, b.T


@triton.jit
def _across_tile(
    da_desc, db_desc, w_desc, s_ptr, y_ptr, z_ptr, b_ptr, expert, first, last, column, N: tl.constexpr,
    K: tl.constexpr, RANK: tl.constexpr, stride: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, MX: tl.constexpr, ASM: tl.constexpr, STEP: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """One tile of a product across the packed dim: ``d [rows, K] · W [K, N]``, column n stored at n·STEP."""
    HB: tl.constexpr = BN // 2
    low_a = tl.zeros([HB, BA], tl.float32)
    high_a = tl.zeros([HB, BA], tl.float32)
    if BB > 0:
        low_b = tl.zeros([HB, BB], tl.float32)
        high_b = tl.zeros([HB, BB], tl.float32)
    n0 = column * BN
    depth = tl.arange(0, BK)
    low_s = _column_scales(s_ptr, expert, depth, n0, N, K, BK, HB, MX)
    high_s = low_s
    if not MX:
        high_s = _column_scales(s_ptr, expert, depth, n0 + HB, N, K, BK, HB, MX)
    for k in tl.range(0, K, BK):
        low_next = _column_scales(s_ptr, expert, k + BK + depth, n0, N, K, BK, HB, MX)
        high_next = low_next
        if not MX:
            high_next = _column_scales(s_ptr, expert, k + BK + depth, n0 + HB, N, K, BK, HB, MX)
        low, high = _across_weight(w_desc, expert, n0, k, low_s, high_s, BK, HB, MX, ASM)
        da = da_desc.load([first, k]).T
        low_a = tl.dot(low, da, low_a)
        high_a = tl.dot(high, da, high_a)
        if BB > 0:
            db = db_desc.load([first + BA, k]).T
            low_b = tl.dot(low, db, low_b)
            high_b = tl.dot(high, db, high_b)
        low_a, high_a = settled(low_a, ASM), settled(high_a, ASM)
        if BB > 0:
            low_b, high_b = settled(low_b, ASM), settled(high_b, ASM)
        low_s, high_s = low_next, high_next
    # The copies' barriers are unmade by one thread; the memory they lie in may be used again only after that.
    tl.debug_barrier()
    c = tl.arange(0, HB)
    if MX:
        n = n0 + (c // HALF) * STEP_DEPTH + c % HALF
        m = n + HALF
    else:
        n = n0 + c
        m = n + HB
    last_a = tl.minimum(last, first + BA)
    if BB > 0:
        finish_rows(low_b, y_ptr, z_ptr, b_ptr, expert, first + BA, last, n, n * STEP, N, RANK, 1, N, stride, BB,
                     LORA, RP)  # fmt: skip
        finish_rows(high_b, y_ptr, z_ptr, b_ptr, expert, first + BA, last, m, m * STEP, N, RANK, 1, N, stride, BB,
                     LORA, RP)  # fmt: skip
    finish_rows(low_a, y_ptr, z_ptr, b_ptr, expert, first, last_a, n, n * STEP, N, RANK, 1, N, stride, BA, LORA, RP)
    finish_rows(high_a, y_ptr, z_ptr, b_ptr, expert, first, last_a, m, m * STEP, N, RANK, 1, N, stride, BA, LORA, RP)


@triton.jit
def packed_dx_kernel(
    da_desc, db_desc, w_desc, s_ptr, y_ptr, z_ptr, b_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr,
    MX: tl.constexpr, ASM: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """``dx [R, N] = dgu [R, K] W (+ t A)`` for W [E, K, N] packed along N; A is [E, r, N]."""
    tiles, columns = tl.load(tiles_ptr), tl.cdiv(N, BN)
    if tl.program_id(0) >= tiles * columns:
        return
    tile, column = tile_of(tiles, columns, GROUP)
    expert, first, last = tl.load(expert_ptr + tile), tl.load(first_ptr + tile), tl.load(last_ptr + tile)
    _across_tile(da_desc, db_desc, w_desc, s_ptr, y_ptr, z_ptr, b_ptr, expert, first, last, column, N, K,
                 RANK, N, BA, BB, BN, BK, MX, ASM, 1, LORA, RP)  # fmt: skip


@triton.jit
def packed_activation_bwd_kernel(
    da_desc, db_desc, w_desc, s_ptr, gu_ptr, dgu_ptr, t_ptr, a_ptr, expert_ptr, first_ptr, last_ptr, tiles_ptr,
    H: tl.constexpr, I: tl.constexpr, F: tl.constexpr, RANK: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    MX: tl.constexpr, ASM: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    P2: tl.constexpr, GATED: tl.constexpr, LORA: tl.constexpr, RP: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """``dgu [R, F]`` from ``dy [R, H]``.

    The product's tile leaves the registers before the activation's gradient: it is stored rounded where dgate will
    stand, read back in strips of rows out of the cache by the same program, and overwritten.
    """
    tiles, columns = tl.load(tiles_ptr), tl.cdiv(I, BN)
    if tl.program_id(0) >= tiles * columns:
        return
    tile, column = tile_of(tiles, columns, GROUP)
    expert, first, last = tl.load(expert_ptr + tile), tl.load(first_ptr + tile), tl.load(last_ptr + tile)
    _across_tile(da_desc, db_desc, w_desc, s_ptr, dgu_ptr, t_ptr, a_ptr, expert, first, last, column, I, H,
                 RANK, F, BA, BB, BN, BK, MX, ASM, STEP, LORA, RP)  # fmt: skip
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
        dg, du = activate_bwd(dh, g, u, KIND, P0, P1, P2)
        tl.store(dgu_ptr + at, dg.to(dgu_ptr.dtype.element_ty), mask=live)
        if GATED:
            tl.store(dgu_ptr + at + up, du.to(dgu_ptr.dtype.element_ty), mask=live)
