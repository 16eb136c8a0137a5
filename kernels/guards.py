"""Typed refusals that every fused operator shares. No torch here: tensors are duck-typed.

An operator never guesses: an input outside its contract raises a KernelError with a stable code.

NaN policy: NaN and infinity are data. They reach exactly the outputs that eager torch would give them
to (their own row, and gradients summed over rows); they never reach another row and are never cleared.

Legend: T rows, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from shardwright.schemas.errors import KernelError

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of one value of each dtype that reference, eager and fused paths use."""

VECTOR_BYTES = 16
"""Widest load and store of one thread; tensors must start on such a boundary."""


class TensorLike(Protocol):
    """What a guard looks at: a tensor, a fake tensor, or a test double."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def device(self) -> Any: ...
    def is_contiguous(self) -> bool: ...
    def data_ptr(self) -> int: ...


def refuse(op: str, code: str, what: str, next_action: str) -> KernelError:
    """The error that a guard raises; ``where`` is always the operator's name."""
    return KernelError(code, what, where=op, next_action=next_action)


def dtype_name(tensor: TensorLike) -> str:
    """``torch.bfloat16`` becomes ``bfloat16``."""
    return str(tensor.dtype).rpartition(".")[2]


def one_dtype(op: str, tensors: Mapping[str, TensorLike], allowed: tuple[str, ...]) -> None:
    """All tensors share one dtype out of ``allowed``.

    Raises:
        KernelError: ``dtype-mixed`` or ``dtype-unsupported``.
    """
    names = {role: dtype_name(tensor) for role, tensor in tensors.items()}
    if len(set(names.values())) > 1:
        found = ", ".join(f"{role} is {name}" for role, name in names.items())
        raise refuse(op, "dtype-mixed", found, "cast all inputs to one dtype, or keep this module eager")
    name = next(iter(names.values()))
    if name not in allowed:
        raise refuse(op, "dtype-unsupported", f"dtype is {name}", f"use one of {', '.join(allowed)}")


def one_device(op: str, tensors: Mapping[str, TensorLike], *, interpreted: bool) -> None:
    """All tensors lie on one CUDA device; on the CPU only under Triton's interpreter.

    Raises:
        KernelError: ``device-mixed`` or ``device-unsupported``.
    """
    places = {role: str(tensor.device) for role, tensor in tensors.items()}
    if len(set(places.values())) > 1:
        found = ", ".join(f"{role} on {place}" for role, place in places.items())
        raise refuse(op, "device-mixed", found, "move all inputs to one device")
    kind = next(iter(tensors.values())).device.type
    if kind != "cuda" and not (kind == "cpu" and interpreted):
        raise refuse(op, "device-unsupported", f"tensors lie on {kind}", "run on a CUDA device, or keep eager here")


def dense(op: str, tensors: Mapping[str, TensorLike]) -> None:
    """Every tensor is contiguous and starts on a 16-byte boundary.

    Raises:
        KernelError: ``not-contiguous`` or ``misaligned``.
    """
    for role, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise refuse(op, "not-contiguous", f"{role} has gaps or a permuted layout", f"pass {role}.contiguous()")
        if tensor.data_ptr() % VECTOR_BYTES:
            offset = tensor.data_ptr() % VECTOR_BYTES
            raise refuse(
                op, "misaligned", f"{role} starts {offset} bytes past a 16-byte boundary", f"pass {role}.clone()"
            )


def same_shape(op: str, tensors: Mapping[str, TensorLike]) -> None:
    """All tensors have one shape.

    Raises:
        KernelError: ``wrong-shape``.
    """
    shapes = {role: tuple(tensor.shape) for role, tensor in tensors.items()}
    first = next(iter(shapes.values()))
    # Sizes are compared one by one: a symbolic size of torch.compile has no hash.
    if any(len(s) != len(first) or any(a != b for a, b in zip(s, first, strict=True)) for s in shapes.values()):
        found = ", ".join(f"{role} is {list(shape)}" for role, shape in shapes.items())
        raise refuse(op, "wrong-shape", found, "pass tensors of one shape")


def row_vector(op: str, x: TensorLike, weight: TensorLike, largest: int) -> None:
    """``x`` is ``[..., H]`` and ``weight`` is ``[H]`` with ``1 <= H <= largest``.

    Raises:
        KernelError: ``wrong-shape`` or ``hidden-too-large``.
    """
    if len(x.shape) < 1 or len(weight.shape) != 1 or x.shape[-1] != weight.shape[0] or weight.shape[0] < 1:
        found = f"x is {list(x.shape)}, weight is {list(weight.shape)}"
        raise refuse(op, "wrong-shape", found, "pass x [..., H] and weight [H] with H >= 1")
    if weight.shape[0] > largest:
        what = f"H is {weight.shape[0]}; one row must fit in one program's registers (H <= {largest})"
        raise refuse(op, "hidden-too-large", what, "keep this module eager or use torch.compile for it")


def epsilon(op: str, eps: float) -> None:
    """``eps`` is finite and not negative.

    Raises:
        KernelError: ``bad-epsilon``.
    """
    if not (math.isfinite(eps) and eps >= 0):
        raise refuse(op, "bad-epsilon", f"eps is {eps!r}", "pass the model's own rms_norm_eps, a small number >= 0")
