"""Loops over experts whose length, and cuts of rows whose sizes, depend on the routing: traced with leaves in between.

``for e in hit.nonzero()`` becomes a loop over all experts, which computes the same: an expert without rows adds
nothing. The rows of one expert, and the pieces of rows sorted by expert, are leaves whose results have sizes that only
stand for the real ones; in fp64 the leaves give what the library's own calls give. What a class does with such a value
beside looping or cutting raises, and the block stays opaque.
Legend: T tokens, K experts per token, E experts, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from shardwright.agents.structure.opaque import NAMESPACE

MOST = 64
"""Experts up to which a loop is unrolled; a longer one makes a graph that nobody reads."""

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("rows_of(Tensor chosen) -> (Tensor, Tensor)")
_LIBRARY.define("pieces(Tensor rows, Tensor counts) -> Tensor[]")
_LIBRARY.impl(
    "rows_of",
    lambda chosen: tuple(torch.empty(chosen.numel(), dtype=torch.long, device="meta") for _ in range(2)),
    "Meta",
)
_LIBRARY.impl("pieces", lambda rows, counts: [part.clone() for part in rows.tensor_split(counts.numel())], "Meta")


def run_rows(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``[K, T]`` is not zero: the place among a token's experts, and the token."""
    place, token = torch.where(chosen)
    return place, token


def run_pieces(rows: Tensor, counts: Tensor) -> list[Tensor]:
    """``[R, ·]`` cut into ``E`` pieces of ``counts`` rows."""
    return list(torch.split(rows, counts.tolist()))


class _Hit:
    """Numbers of experts, in the form of the rows of ``nonzero()``; can be looped over, and nothing else."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[int]]:
        return iter((number,) for number in range(self.count))


class _Counts:
    """Rows of each expert, as ``tolist()`` gives them; can cut rows, and nothing else."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class _Leaves(TorchFunctionMode):
    """While open, calls whose results have sizes that depend on data give leaves.

    Args:
        experts: how many a loop runs over; ``None`` where no loop is expected, so that ``nonzero`` stays as it is.
    """

    def __init__(self, experts: int | None) -> None:
        super().__init__()
        self.hits = () if experts is None else ((experts,), (experts + 1,))
        self.experts = experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.split and len(args) > 1 and isinstance(args[1], _Counts):
            if kwargs.get("dim", args[2] if len(args) > 2 else 0) != 0:
                raise RuntimeError("rows are cut along another dimension than the first")
            return torch.ops.shardwright_capture.pieces(args[0], args[1].values)
        if self.experts is not None and not kwargs and len(args) == 1:
            if func in (torch.nonzero, torch.Tensor.nonzero) and tuple(args[0].shape) in self.hits:
                return _Hit(self.experts)
            if func is torch.where and args[0].dim() == 2:
                return torch.ops.shardwright_capture.rows_of(args[0])
        return func(*args, **kwargs)


@contextmanager
def _lists() -> Iterator[None]:
    """While open, a vector of integers that has no values gives its list as what can cut rows.

    Tracers' tensors have a method of their own, which asks for each value.
    """
    kinds: tuple[Any, ...] = (Tensor, FakeTensor, FunctionalTensor)
    before = {kind: vars(kind).get("tolist") for kind in kinds}
    try:
        for kind in before:
            kind.tolist = _counting(kind.tolist)
        yield
    finally:
        for kind, method in before.items():
            if method is None:
                del kind.tolist
            else:
                kind.tolist = method


def _counting(own: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def tolist(values: Tensor) -> Any:
        counts = values.device.type == "meta" and values.dim() == 1 and not values.is_floating_point()
        return _Counts(values) if counts else own(values)

    return tolist


@contextmanager
def counted_cuts(layer: nn.Module) -> Iterator[None]:
    """While open, a layer's cuts of rows by counts of experts are leaves."""
    with _wrapped(layer, None):
        yield


@contextmanager
def unrolled(experts: nn.Module) -> Iterator[None]:
    """While open, an experts module's own loop runs over all of its experts, their rows being leaves."""
    count = getattr(experts, "num_experts", None)
    with _wrapped(experts, count if isinstance(count, int) and count <= MOST else None):
        yield


@contextmanager
def _wrapped(module: nn.Module, count: int | None) -> Iterator[None]:
    """A module whose forward runs with leaves; one whose forward is replaced already keeps that."""
    if "forward" in module.__dict__:
        yield
        return
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _lists(), _Leaves(count):
            return own(*args, **kwargs)

    try:
        module.__dict__["forward"] = forward
        yield
    finally:
        del module.__dict__["forward"]
