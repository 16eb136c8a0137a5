"""A bf16 model in fp32 arithmetic: the same weights, no rounding between operators.

Two bf16 computations of one function differ by the rounding of both, and by how much depends on the model: a layer
whose output is no large sum beside small terms amplifies it. Where two ways differ by more than rounding usually does,
both are held against this third one (:func:`as_near`), as every kernel is held against fp64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.schemas.errors import RunError

NEARER = 1.5
"""How much farther from the wide values than the plain way's the other way's may be: largest errors scatter."""
MOST = 0.05
"""Relative error above which bf16 says nothing about a model, and no comparison passes."""
NARROW = (torch.bfloat16, torch.float16)
MOVES = ("copy_", "_foreach_copy_", "split_with_sizes_copy", "resize_", "set_")
"""Operators that carry values from place to place; what they write keeps its dtype."""


class Wide(TorchDispatchMode):
    """Inside it every operator of torch computes in fp32 from bf16 values; weights stay as they are in memory.

    Views are not copied, and a cast of fp32 values to bf16 is left out. What an operator writes in place keeps its
    dtype. Collectives and custom operators run as they are. For forward passes: what it makes has no gradient.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func.namespace != "aten" or name in MOVES or _is_view(func):
            return func(*args, **kwargs)
        if name == "_to_copy" and kwargs.get("dtype") in NARROW and args[0].dtype is torch.float32:
            return func(*args, **{**kwargs, "dtype": torch.float32})
        if name == "_grouped_mm":
            return grouped(*args, **kwargs)
        return _widened(func, args, kwargs)


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write


def _widened(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run with wide arguments; what the operator writes is written back in its own dtype."""
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    names = [argument.name for argument in func._schema.arguments]
    targets = {name for name, writes in zip(names, written, strict=True) if writes}
    if not targets:
        return func(*(_wide(value) for value in args), **{key: _wide(value) for key, value in kwargs.items()})
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    wide = {key: _wide(value) for key, value in given.items()}
    positional = [wide[name] for name in names[: len(args)]]
    result = func(*positional, **{key: wide[key] for key in kwargs})
    for key in targets & given.keys():
        if isinstance(given[key], Tensor) and wide[key] is not given[key]:
            given[key].copy_(wide[key])
            result = given[key] if result is wide[key] else result
    return result


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in NARROW else value
    if isinstance(value, (list, tuple)):
        return type(value)(_wide(item) for item in value)
    return value


def grouped(a: Tensor, b: Tensor, offs: Tensor, *rest: Any, **options: Any) -> Tensor:
    """``[N, K] × [E, K, M]`` → ``[N, M]`` by groups of rows; rows past the last offset are zero.

    Raises:
        RunError: ``check-grouped-product`` for operands of other dims, as those of a weight's gradient.
    """
    if a.dim() != 2 or b.dim() != 3:
        raise RunError(
            "check-grouped-product",
            f"a grouped product of {a.dim()} and {b.dim()} dims has no fp32 form here",
            where="checks before the first step",
            next_action="report the model's family; a forward pass has products of 2 and 3 dims alone",
        )
    out = torch.zeros((a.shape[0], b.shape[2]), dtype=torch.float32, device=a.device)
    start = 0
    for group, stop in enumerate(offs.tolist()):
        if stop > start:
            out[start:stop] = a[start:stop].float() @ b[group].float()
        start = stop
    return out


def largest_difference(values: Tensor, exact: Tensor) -> float:
    """The largest difference over the largest value."""
    exact = exact.float()
    return float((values.to(exact.device).float() - exact).abs().max() / exact.abs().max().clamp_min(1e-12))


def as_near(ours: float, plain: float) -> bool:
    """Whether an error against wide values is that of bf16 rounding: not much above the plain way's, and small."""
    return ours <= MOST and ours <= NEARER * plain


def in_fp32(errors: tuple[float, ...] | None, plain: str) -> str:
    """For the evidence: how far ours and the plain way are from the wide one; empty where that was not asked."""
    if errors is None:
        return ""
    return (
        f" (against fp32 arithmetic: {errors[0]:.1e}, {plain} itself {errors[1]:.1e}, allowed {NEARER:g} times that "
        f"and {MOST:.0e})"
    )
