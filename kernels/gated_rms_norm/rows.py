"""Where the rows of a strided tensor start: any leading dimensions folded into at most three steps.

A slice of a joint projection, a transposed pair of heads and tokens, or an expanded row all keep rows of
``D`` neighbouring values; only the starts of the rows differ. No torch here: tensors are duck-typed.

Legend: D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.kernels.guards import refuse

MOST_STEPS = 3


class RowSteps(NamedTuple):
    """Row ``r`` starts at ``(r // inner // middle)·outer_stride + (r // inner % middle)·middle_stride +
    (r % inner)·inner_stride`` values."""

    middle: int
    inner: int
    outer_stride: int
    middle_stride: int
    inner_stride: int


def steps(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """``(size, stride)`` of the leading dimensions, outermost first, with neighbours merged where one
    stride walks over both. Sizes of 1 vanish; at least one step remains."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found or [(1, 0)]


def row_steps(op: str, role: str, shape: Sequence[int], strides: Sequence[int]) -> RowSteps:
    """Row starts of a tensor ``[..., D]`` whose last dimension is dense.

    Args:
        op: operator's name, for the refusal.
        role: the tensor's name there.
        shape: of the whole tensor; all sizes at least 1.
        strides: in values.

    Raises:
        KernelError: ``row-layout`` where more than three steps remain.
    """
    found = steps(shape[:-1], strides[:-1])
    if len(found) > MOST_STEPS:
        what = f"{role} is {list(shape)} with strides {list(strides)}: {len(found)} steps between rows"
        raise refuse(op, "row-layout", what, f"pass {role}.contiguous()")
    if len(found) == 1:
        return RowSteps(1, 1, found[0][1], 0, 0)
    if len(found) == 2:
        return RowSteps(1, found[1][0], found[0][1], 0, found[1][1])
    return RowSteps(found[1][0], found[2][0], found[0][1], found[1][1], found[2][1])
