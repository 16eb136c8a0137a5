"""Guards once for each layout: what they decide depends on nothing but layouts, addresses and settings.

All guards of an operator with six tensors cost the host several times what its launch does (92 µs on one
busy 2-core machine), as long as the kernel itself runs on an H200. Whether they pass follows from shapes,
strides, dtypes, devices and settings, which repeat in every step; only addresses must be looked at anew.

A layout that has passed has a token. It stands for all that launches depend on but for addresses, so launches
are bound under it (``kernels.bound``).

No torch here: tensors are duck-typed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from shardwright.kernels.guards import VECTOR_BYTES, TensorLike

_apart: list[bool] = []


class Strided(TensorLike, Protocol):
    """A tensor whose layout is looked at too."""

    def stride(self) -> Any: ...


class Admitted:
    """Layouts that have passed an operator's guards; keyed by value, so a recycled tensor cannot mislead it."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._known: dict[Hashable, object] = {}

    def check(self, tensors: Sequence[Strided | None], settings: Hashable, guards: Callable[[], None]) -> object | None:
        """Run ``guards`` unless this layout has passed them and every tensor starts on a 16-byte boundary.

        Args:
            tensors: everything that the guards look at.
            settings: everything else they look at.
            guards: raises where an input breaks the contract.

        Returns:
            The layout's token; ``None`` inside ``apart()``.
        """
        key = (
            settings,
            *((t.shape, t.stride(), t.dtype, t.device) if t is not None else None for t in tensors),
        )
        token = self._known.get(key)
        if token is None or any(t is not None and t.data_ptr() % VECTOR_BYTES for t in tensors):
            guards()
        if token is None:
            if len(self._known) >= self._most:
                self._known.clear()
            token = self._known[key] = object()
        return None if _apart else token


@contextmanager
def apart() -> Iterator[None]:
    """Calls inside the block get no token: launch choices differ from those that were bound."""
    _apart.append(True)
    try:
        yield
    finally:
        _apart.pop()
