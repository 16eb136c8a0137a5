# mypy: disable-error-code="no-untyped-def"
"""The routing weights' gradient, from rows back to entries.

Legend: N = T·K entries, R rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def weight_grad_kernel(part_ptr, place_ptr, dweights_ptr, N, BLOCK: tl.constexpr):
    """``dweights [N]``: ``part[place[n]]``; 0 for entries that have no row."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(place_ptr + at, mask=at < N, other=-1).to(tl.int64)
    value = tl.load(part_ptr + row, mask=row >= 0, other=0.0)
    tl.store(dweights_ptr + at, value.to(dweights_ptr.dtype.element_ty), mask=at < N)
