# mypy: disable-error-code="no-untyped-def"
"""The chain of chunks as an affine map, so that pieces of one document run side by side.

Over any run of chunks the state moves by ``S⁺ = M S + N``: a chunk has ``M = d - keᵀ w`` and ``N = keᵀ u``. The
gradient of the state moves backwards by the transpose of the same M.

Legend: C tokens of a chunk, HV value heads, K key width, V value width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.kda.triton import chunk_decay


@triton.jit
def kda_summary_kernel(
    w_ptr, u_ptr, ke_ptr, total_ptr, first_ptr, summary_ptr, HV,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr,
    PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One piece, value head and block of columns of ``[N | M]``: ``summary [piece, HV, K, V + K]`` in fp32.

    N starts from a state of zeros and takes u; M starts from the identity and takes no values.
    """
    block = tl.program_id(0)
    hv = tl.program_id(1)
    piece = tl.program_id(2)
    first = tl.load(first_ptr + piece)
    last = tl.load(first_ptr + piece + 1)
    rows = tl.arange(0, C)
    keys = tl.arange(0, K)
    cols = block * BV + tl.arange(0, BV)
    narrow = w_ptr.dtype.element_ty
    state = tl.where(keys[:, None] == cols[None, :] - V, 1.0, 0.0)
    for chunk in tl.range(first, last, num_stages=STAGES):
        tile = tl.cast(chunk, tl.int64) * HV + hv
        wide = (tile * C + rows[:, None]) * K + keys[None, :]
        w = tl.load(w_ptr + wide)
        ke = tl.load(ke_ptr + wide)
        u = tl.load(u_ptr + (tile * C + rows[:, None]) * V + cols[None, :], mask=cols[None, :] < V, other=0.0)
        decay = chunk_decay(total_ptr, tile, keys, K, C, CHANNELS)
        new = (u - tl.dot(w, state.to(narrow), input_precision=PREC)).to(narrow)
        state = tl.dot(tl.trans(ke), new, state * decay, input_precision=PREC)
    at = (piece.to(tl.int64) * HV + hv) * K * (V + K) + keys[:, None] * (V + K) + cols[None, :]
    tl.store(summary_ptr + at, state)


@triton.jit
def kda_combine_kernel(
    summary_ptr, own_ptr, pieces_ptr, initial_ptr, starts_ptr, final_ptr, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WITH_INITIAL: tl.constexpr, WITH_FINAL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """One document, value head and block of value columns: the state before each of its pieces, fp32.

    REVERSE goes from the last piece to the first with the transposed transitions and ``own`` in place of N: then
    ``starts`` are the gradients of the states after the pieces.
    """
    vb = tl.program_id(0)
    hv = tl.program_id(1)
    doc = tl.program_id(2)
    first = tl.load(pieces_ptr + doc)
    last = tl.load(pieces_ptr + doc + 1)
    keys = tl.arange(0, K)
    cols = vb * BV + tl.arange(0, BV)
    corner = (doc.to(tl.int64) * HV + hv) * K * V + keys[:, None] * V + cols[None, :]
    state = tl.zeros((K, BV), tl.float32)
    if WITH_INITIAL:
        state += tl.load(initial_ptr + corner).to(tl.float32)
    for step in range(last - first):
        piece = first + step
        if REVERSE:
            piece = last - 1 - step
        tile = tl.cast(piece, tl.int64) * HV + hv
        at = (tile * K + keys[:, None]) * V + cols[None, :]
        tl.store(starts_ptr + at, state)
        tl.debug_barrier()
        if REVERSE:
            state = tl.load(own_ptr + at)
        else:
            state = tl.load(summary_ptr + (tile * K + keys[:, None]) * (V + K) + cols[None, :])
        for kb in range(K // BK):
            inner = kb * BK + tl.arange(0, BK)
            before = tl.load(starts_ptr + (tile * K + inner[:, None]) * V + cols[None, :])
            if REVERSE:
                move = tl.load(summary_ptr + (tile * K + inner[None, :]) * (V + K) + V + keys[:, None])
            else:
                move = tl.load(summary_ptr + (tile * K + keys[:, None]) * (V + K) + V + inner[None, :])
            state = tl.dot(move, before, state, input_precision="tf32x3")
        tl.debug_barrier()
    if WITH_FINAL:
        tl.store(final_ptr + corner, state)
