"""Where the documents of the rows that run now begin and end, for layers that carry a state along a row.

Attention keeps documents apart by masks that are built from positions. A recurrent layer would carry its state, and a
convolution its last inputs, across a border. Inside :func:`segments` such a layer runs every document by itself. A
recomputation under activation checkpointing takes the documents of its forward.
Legend: B rows, S tokens a row, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

Bounds = tuple[tuple[int, ...], ...]
"""For each row: 0, every later place where a document begins, S."""

RECURRENT = frozenset(
    {
        *("KimiLinearDeltaAttention", "DeltaAttention", "BailingHybridDeltaAttention"),
        *("Qwen3NextGatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet", "LaraMiniGatedDeltaNet"),
        *("NemotronHMamba2Mixer", "GraniteMoeHybridMambaLayer", "JambaMambaMixer"),
        *("MiniMaxLightningAttention", "Lfm2MoeShortConv", "InklingShortConvolution"),
        *("Glm5NextTextLinearAttention", "Glm5NextTextAttention", "DeepseekV4Attention"),
        *("Inkling2ShortConvolution", "Inkling2DynamicShortConvolution"),
        *("Inkling2LoopShortConvolution", "Inkling2LoopDynamicShortConvolution", "ZayaCCAProjection"),
    }
)
"""Classes of layers that carry a state, or a convolution's last inputs, along a row [B, S, H]; and those whose
attention counts its pools of keys from the row's first token."""

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


def by_document(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that meets no document's end but its own input's.

    What has a value for every token, [B, S, ...], is cut and joined with the input, masks [B, n, S, S] in both of their
    last dims; a state that a layer returns beside its output belongs to one document and is ``None`` here.
    """

    def apart(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        bounds = active()
        if bounds is None:
            return forward(hidden_states, *args, **kwargs)
        size = hidden_states.shape[:2]
        pieces: list[Any] = []
        with segments(None):
            for row, of_row in enumerate(bounds):
                for start, stop in pairwise(of_row):
                    cut = partial(_cut, size, slice(row, row + 1), slice(start, stop))
                    named = {name: cut(value) for name, value in kwargs.items()}
                    pieces.append(forward(cut(hidden_states), *map(cut, args), **named))
        if not isinstance(pieces[0], tuple):
            return _joined(pieces, bounds)
        return tuple(_joined(list(column), bounds) for column in zip(*pieces, strict=True))

    return apart


def _cut(size: torch.Size, row: slice, part: slice, value: Any) -> Any:
    """One document's part of a tensor that has a value for every token or for every pair, alone or in a group of such;
    anything else as it is."""
    if isinstance(value, dict):
        return {key: _cut(size, row, part, one) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cut(size, row, part, one) for one in value)
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 4 and value.shape[0] == size[0] and value.shape[2:] == (size[1], size[1]):
        return value[row, :, part, part]
    return value[row, part] if value.shape[:2] == size else value


def _joined(pieces: list[Any], bounds: Bounds) -> Tensor | None:
    """[1, s, ...] of each document → [B, S, ...]; ``None`` for what has no value for every token."""
    sizes = [[stop - start for start, stop in pairwise(of_row)] for of_row in bounds]
    flat = [size for row in sizes for size in row]
    whole = [isinstance(one, Tensor) and one.shape[:2] == (1, size) for one, size in zip(pieces, flat, strict=True)]
    if not all(whole):
        return None
    left = iter(pieces)
    return torch.cat([torch.cat([next(left) for _ in row], dim=1) for row in sizes])
