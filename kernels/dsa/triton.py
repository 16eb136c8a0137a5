# mypy: disable-error-code="no-untyped-def"
"""Sigmoid output gate over another attention's output: one pass forward, one backward.

Legend: N values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardwright.kernels.dsa.attention.triton import LOG2_E


@triton.jit
def gate_kernel(o_ptr, gate_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """``y = o · σ(gate)``, rounded once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    o = tl.load(o_ptr + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (o / (1.0 + tl.exp2(-z * LOG2_E))).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate_backward_kernel(dy_ptr, o_ptr, gate_ptr, do_ptr, dgate_ptr, N, BLOCK: tl.constexpr):
    """``dO = dy · σ``; ``dgate = dy · o · σ · (1 - σ)``, with 1 - σ as σ(-gate): no cancellation where it is small."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    do = dy / (1.0 + tl.exp2(-z * LOG2_E))
    kind = do_ptr.dtype.element_ty
    tl.store(do_ptr + at, do.to(kind), mask=mask)
    tl.store(dgate_ptr + at, (do * o / (1.0 + tl.exp2(z * LOG2_E))).to(kind), mask=mask)
