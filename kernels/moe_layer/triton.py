# mypy: disable-error-code="no-untyped-def"
"""The routing weights' gradient, out of the backward product's partial sums.

Legend: N = T·K entries, R rows, P partial sums a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def weight_grad_kernel(part_ptr, place_ptr, dweights_ptr, N, P, PP: tl.constexpr, BLOCK: tl.constexpr):
    """``dweights [N]``: the sum over P of ``part[place[n]]``, in order; 0 for entries that have no row."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(place_ptr + at, mask=at < N, other=-1).to(tl.int64)
    parts = tl.arange(0, PP)
    mask = (row >= 0)[:, None] & (parts < P)[None, :]
    total = tl.sum(tl.load(part_ptr + row[:, None] * P + parts[None, :], mask=mask, other=0.0), axis=1)
    tl.store(dweights_ptr + at, total.to(dweights_ptr.dtype.element_ty), mask=at < N)
