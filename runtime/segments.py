"""Where the documents of the rows that run now begin and end, for layers that carry a state along a row.

Attention keeps documents apart by masks that transformers builds from positions. A recurrent layer would carry its
state, and its convolution its last inputs, across a border. Inside :func:`segments_of` such a layer runs every document
by itself. A recomputation under activation checkpointing takes the documents of its forward.
Legend: B rows, S tokens a row, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Bounds = tuple[tuple[int, ...], ...]
"""For each row: 0, every later place where a document begins, S."""

RECURRENT = frozenset({"KimiLinearDeltaAttention", "DeltaAttention"})
"""Classes of layers that carry a state along a row and return [B, S, H]."""

_active: list[Bounds | None] = [None]


def bounds_of(positions: Tensor) -> Bounds | None:
    """[B, S] positions that start anew with every document → bounds; ``None`` where every row is one document."""
    starts = (positions == 0).tolist()
    length = positions.shape[1]
    rows = tuple((0, *(place for place in range(1, length) if row[place]), length) for row in starts)
    return rows if any(len(row) > 2 for row in rows) else None


@contextmanager
def segments(bounds: Bounds | None) -> Iterator[None]:
    """Inside the block the rows that run have these documents."""
    _active.append(bounds)
    try:
        yield
    finally:
        _active.pop()


def active() -> Bounds | None:
    """The documents of the rows that run now; ``None`` where every row is one."""
    return _active[-1]


def recurrent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name → layer that carries a state along a row."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ in RECURRENT}


def keep_apart(model: nn.Module) -> None:
    """Make every recurrent layer run each document by itself."""
    for module in recurrent_layers(model).values():
        module.forward = by_document(module.forward)


def by_document(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer's forward that meets no document's end but its own input's."""

    def apart(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        bounds = active()
        if bounds is None:
            return forward(hidden_states, *args, **kwargs)
        with segments(None):
            rows = [
                torch.cat([forward(row[:, start:stop], *args, **kwargs) for start, stop in pairwise(of_row)], dim=1)
                for row, of_row in zip(hidden_states.split(1), bounds, strict=True)
            ]
        return torch.cat(rows)

    return apart
