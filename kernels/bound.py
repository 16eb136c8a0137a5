"""Launches bound once: what a step repeats is looked up, not worked out again.

A launch through triton costs the host 25 to 60 µs: configuration, tensor descriptors, arguments bound by name,
each specialised anew. An operator's token (``kernels.admitted``) and the launch's role inside it decide all of
that but the tensors' addresses. So the first launch goes through triton and is remembered under (token, role):
compiled kernel, grid, every argument that is no tensor, and which of the operator's tensors stands where.
A later one only puts its tensors in. How an operator uses it::

    tensors = (x, w, y)
    if again(key, tensors):
        return
    with device.current(x):
        start(key, tensors, kernel, (grid,), x, TensorDescriptor(w, ...), y, N, BLOCK=64)

Nothing is bound in the interpreter, where launches are recorded, for tensors off a 16-byte boundary, and where
two roles are one tensor (which is which could not be told). A bound launch is left to triton where its tensors'
dtypes, or which of them there are, differ from those that it was bound with: a kernel compiled for others would read
them wrongly without a word. What the launcher refuses ends binding for the process, with a warning, and goes through
triton. Off with ``SHARDWRIGHT_BIND_LAUNCHES=0``, and with any triton but the one whose launcher this is.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

LAUNCHER = "3.6."
"""Versions of triton whose compiled kernels take (grid, stream, function, metadata, three hooks, arguments)."""


def asked(value: str | None, version: str) -> bool:
    """Whether launches are bound: with a triton whose launcher is known, unless the environment's switch is 0.

    A switch of 1 with another triton is answered by a warning.
    """
    known = version.startswith(LAUNCHER)
    if value == "1" and not known:
        warnings.warn(f"launches are not bound: triton is {version}, not {LAUNCHER}x", RuntimeWarning, stacklevel=2)
    return known and value in (None, "1")


BINDS = asked(os.environ.get("SHARDWRIGHT_BIND_LAUNCHES"), triton.__version__)
REFUSALS = (AttributeError, OverflowError, RuntimeError, TypeError, ValueError)
"""What a launcher raises for arguments that it does not take."""
MOST = 1 << 14
"""Bound launches kept; all are forgotten where there are more."""

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)

Tensors = Sequence[Tensor | None]


class Place:
    """A tensor descriptor as triton's launcher reads it, without the checks that its first one has passed."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], padding: str) -> None:
        self.base, self.shape, self.strides, self.padding = base, shape, strides, padding


@dataclass(frozen=True)
class Bound:
    """One launch but for its tensors."""

    kernel: Any
    """The kernel that triton would have been asked for: its hooks are its own."""
    run: Callable[..., object]
    function: Any
    metadata: Any
    grid: tuple[int, int, int]
    device: int
    arguments: list[Any]
    """In the kernel's order; ``None`` where a tensor or a descriptor goes."""
    kinds: tuple[torch.dtype | None, ...]
    """The dtype of every tensor; ``None`` for a role that the launch does not have."""
    tensors: tuple[tuple[int, int], ...]
    """(position, which tensor)."""
    places: tuple[tuple[int, int, list[int], list[int], str], ...]
    """(position, which tensor, shape, strides, padding)."""


_bound: dict[Hashable, Bound] = {}
_given_up: list[str] = []
"""Why nothing is bound any more in this process."""


def key_of(token: object | None, *role: Hashable) -> Hashable:
    """The key of one launch of an operator; ``None`` without a token. ``role`` names it and every choice in it
    that the token does not decide, such as whether a gradient is wanted."""
    return (token, *role) if token is not None and BINDS and not _given_up else None


def again(key: Hashable, tensors: Tensors) -> bool:
    """Start the launch that is bound under ``key`` on these tensors; ``False`` where there is none."""
    bound = _bound.get(key)
    if bound is None or not aligned(tensors) or bound.kinds != kinds(tensors):
        return False
    hooks = knobs.runtime
    if bound.device != current_device() or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        return False
    if bound.kernel.pre_run_hooks:
        return False
    arguments = bound.arguments.copy()
    for at, which in bound.tensors:
        arguments[at] = tensors[which]
    for at, which, shape, strides, padding in bound.places:
        base = tensors[which]
        assert base is not None
        arguments[at] = Place(base, shape, strides, padding)
    stream = current_stream(bound.device)
    try:
        bound.run(*bound.grid, stream, bound.function, bound.metadata, None, None, None, *arguments)
    except REFUSALS as error:
        give_up(f"{type(error).__name__}: {error}")
        return False
    return True


def give_up(why: str) -> None:
    """Bind nothing more in this process, forget what is bound, and say so once."""
    if not _given_up:
        warnings.warn(f"launches go through triton from now on: {why}", RuntimeWarning, stacklevel=3)
        _given_up.append(why)
    _bound.clear()


def given_up() -> str | None:
    """Why nothing is bound any more; ``None`` while launches are bound, or never were."""
    return _given_up[0] if _given_up else None


def kinds(tensors: Tensors) -> tuple[torch.dtype | None, ...]:
    """Dtypes by role."""
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def aligned(tensors: Tensors) -> bool:
    """Whether every tensor starts on a 16-byte boundary: kernels are compiled for that."""
    return not any(tensor is not None and tensor.data_ptr() & 15 for tensor in tensors)


def start(
    key: Hashable, tensors: Tensors, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any
) -> None:
    """``kernel[grid](*arguments, **constants)``, bound under ``key`` where that is possible.

    Args:
        key: of ``key_of``.
        tensors: every tensor among the arguments, a descriptor's too, in a fixed order; ``None`` for a role that
            this launch does not have.
    """
    compiled = kernel[grid](*arguments, **constants)
    if key is None or compiled is None or not aligned(tensors) or kernel.pre_run_hooks:
        return
    found = bind(compiled, kernel, tensors, grid, arguments, constants)
    if found is not None:
        if len(_bound) >= MOST:
            _bound.clear()
        _bound[key] = found


def bind(
    compiled: Any,
    kernel: Any,
    tensors: Tensors,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    constants: dict[str, Any],
) -> Bound | None:
    """A launch without its tensors; ``None`` where two roles are one tensor, or an argument is none of them."""
    which = {id(tensor): at for at, tensor in enumerate(tensors) if tensor is not None}
    if len(which) != sum(tensor is not None for tensor in tensors):
        return None
    values = [*arguments, *(constants[name] for name in kernel.arg_names[len(arguments) :])]
    places, holes = [], []
    for at, value in enumerate(values):
        base = value if isinstance(value, Tensor) else getattr(value, "base", None)
        if base is None:
            continue
        if id(base) not in which:
            return None
        values[at] = None
        if base is value:
            holes.append((at, which[id(base)]))
        else:
            places.append((at, which[id(base)], list(value.shape), list(value.strides), value.padding))
    first = next(tensor for tensor in tensors if tensor is not None)
    sizes = (*grid, 1, 1)
    return Bound(
        kernel=kernel,
        run=compiled.run,
        function=compiled.function,
        metadata=compiled.packed_metadata,
        grid=(sizes[0], sizes[1], sizes[2]),
        device=first.device.index if first.device.index is not None else -1,
        arguments=values,
        kinds=kinds(tensors),
        tensors=tuple(holes),
        places=tuple(places),
    )


def forget() -> None:
    """Drop every bound launch, and why nothing was bound any more."""
    _bound.clear()
    _given_up.clear()
