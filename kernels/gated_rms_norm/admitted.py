"""Guards once for each layout: what they decide depends on nothing but layouts, addresses and settings.

All guards of an operator with six tensors cost the host several times what its launch does (92 µs on one
busy 2-core machine), as long as the kernel itself runs on an H200. Whether they pass follows from shapes,
strides, dtypes, devices and settings, which repeat in every step; only addresses must be looked at anew.

No torch here: tensors are duck-typed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from shardwright.kernels.gated_rms_norm.contract import Strided
from shardwright.kernels.guards import VECTOR_BYTES


class Admitted:
    """Layouts that have passed an operator's guards; keyed by value, so a recycled tensor cannot mislead it."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._known: set[Hashable] = set()

    def check(self, tensors: Sequence[Strided | None], settings: Hashable, guards: Callable[[], None]) -> None:
        """Run ``guards`` unless this layout has passed them and every tensor starts on a 16-byte boundary.

        Args:
            tensors: everything that the guards look at.
            settings: everything else they look at.
            guards: raises where an input breaks the contract.
        """
        key = (
            settings,
            *((t.shape, t.stride(), t.dtype, t.device) if t is not None else None for t in tensors),
        )
        if key in self._known and not any(t is not None and t.data_ptr() % VECTOR_BYTES for t in tensors):
            return
        guards()
        if len(self._known) >= self._most:
            self._known.clear()
        self._known.add(key)
