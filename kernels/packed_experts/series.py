"""Launches that always follow each other, bound as one series: what a layout has decided is looked at once for all.

``bound.again`` looks at every tensor of every launch, and its caller first makes the tuple of them. The launches of a
pass share most tensors: a series names each once, checks it once, and knows where it stands in every launch. What
is started is what ``bound.again`` would start, argument for argument; a series is left to it, and it to triton, for
the same reasons: another device, hooks, a tensor off its boundary or of another dtype, a launch that is bound no more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from shardwright.kernels import bound
from shardwright.kernels.bound import Bound, Place

MOST = 4096
"""Series kept; all are forgotten where there are more."""
HEAD = 9
"""What a launcher takes before a kernel's arguments: grid (3), stream, function, metadata, launch facts, two hooks."""
STREAM = 3


class Step(NamedTuple):
    """One launch of a series."""

    key: Hashable
    bound: Bound
    given: list[Any]
    """All that the launcher gets; ``None`` where the stream, a tensor or a descriptor goes."""
    tensors: tuple[tuple[int, int], ...]
    """(position in ``given``, which tensor of the series)."""
    places: tuple[tuple[int, int, list[int], list[int], str], ...]
    """(position in ``given``, which tensor of the series, shape, strides, padding)."""


@dataclass(frozen=True)
class Series:
    """Launches that follow each other."""

    steps: tuple[Step, ...]
    kinds: tuple[torch.dtype, ...]
    """The dtype of every tensor of the series."""


_series: dict[Hashable, Series] = {}


def find(key: Hashable) -> Series | None:
    """The series that is kept under ``key``."""
    return _series.get(key)


def again(series: Series | None, tensors: Sequence[Tensor]) -> bool:
    """Start the series on these tensors, in its own order; ``False`` where there is none, or it may not be.

    Where a launcher refuses, ``False`` comes after earlier launches have started: a series must bear to be started
    anew from its beginning.
    """
    if series is None:
        return False
    hooks, here = knobs.runtime, bound.current_device()
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        return False
    for tensor, kind in zip(tensors, series.kinds, strict=True):
        if tensor.data_ptr() & 15 or tensor.dtype is not kind:
            return False
    held = bound._bound
    for step in series.steps:
        found = step.bound
        if held.get(step.key) is not found or found.device != here or found.kernel.pre_run_hooks:
            return False
    stream = bound.current_stream(here)
    try:
        for _, found, given, holes, places in series.steps:
            filled = given.copy()
            filled[STREAM] = stream
            for at, which in holes:
                filled[at] = tensors[which]
            for at, which, shape, strides, padding in places:
                filled[at] = Place(tensors[which], shape, strides, padding)
            found.run(*filled)
    except bound.REFUSALS as error:
        bound.give_up(f"{type(error).__name__}: {error}")
        return False
    return True


def keep(key: Hashable, order: Sequence[str], launches: Iterable[tuple[Hashable, Sequence[str | None]]]) -> None:
    """Make a series of launches that are bound by now, and keep it; nothing where one of them is not bound.

    Args:
        key: of ``find``.
        order: names of the series' tensors.
        launches: the key of each launch, and the name of each of its tensors in that launch's own order; ``None`` for
            a role that it does not have.
    """
    found = _bind({name: at for at, name in enumerate(order)}, launches)
    if found is not None:
        if len(_series) >= MOST:
            _series.clear()
        _series[key] = found


def _bind(at: dict[str, int], launches: Iterable[tuple[Hashable, Sequence[str | None]]]) -> Series | None:
    steps: list[Step] = []
    kinds: dict[str, torch.dtype] = {}
    for key, names in launches:
        one = bound._bound.get(key)
        if one is None or len(one.kinds) != len(names):
            return None
        for name, kind in zip(names, one.kinds, strict=True):
            if (name is None) != (kind is None):
                return None
            if name is not None and kind is not None and kinds.setdefault(name, kind) is not kind:
                return None
        which = [None if name is None else at[name] for name in names]
        steps.append(_step(key, one, which))
    if kinds.keys() != at.keys():
        return None
    return Series(tuple(steps), tuple(kinds[name] for name in at))


def _step(key: Hashable, one: Bound, which: Sequence[int | None]) -> Step:
    given = [*one.grid, None, one.function, one.metadata, None, None, None, *one.arguments]
    tensors = [(HEAD + place, which[at]) for place, at in one.tensors]
    places = [(HEAD + place, which[at], *how) for place, at, *how in one.places]
    return Step(key, one, given, tuple(tensors), tuple(places))  # type: ignore[arg-type]
