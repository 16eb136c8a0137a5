"""What the codecs share: exact value tables, and refusals of packed tensors that cannot be read.

A codec turns packed file tensors into values and back, in the file's own layout. Decoding is exact: a code has one
value, and a product with its scale is rounded once, to the dtype asked for. Encoding rounds to the nearest code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.schemas.errors import CheckpointError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit float, by its lower three bits; bit 3 is the sign (OCP Microscaling 1.0, table 5)."""

E2M1_LARGEST_EXPONENT = 2
"""Exponent of the largest 4-bit magnitude, 6 = 1.5 · 2²."""

E8M0_BIAS, E8M0_NAN = 127, 255
"""A scale's code c is 2^(c - 127); 255 is NaN, and there is no zero (OCP Microscaling 1.0, 5.4.1)."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def refuse(code: str, what: str, layout: str, next_action: str) -> CheckpointError:
    """The error that a codec raises; ``where`` names the layout."""
    return CheckpointError(code, what, where=f"packing {layout}", next_action=next_action)


def check_dtype(layout: str, role: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Raises: CheckpointError: ``packed-dtype`` where a file tensor has another dtype."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise refuse("packed-dtype", f"{role} is {tensor.dtype}", layout, f"pass {role} as {names}")


def check_shape(layout: str, role: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    """Raises: CheckpointError: ``packed-shape`` where a file tensor has another shape."""
    if tuple(tensor.shape) != wanted:
        found = f"{role} is {list(tensor.shape)}"
        raise refuse("packed-shape", found, layout, f"{role} must be {list(wanted)}: values and scales do not match")


def check_target(layout: str, dtype: torch.dtype) -> None:
    """Raises: CheckpointError: ``packed-dtype`` where values are wanted in a dtype that cannot hold them."""
    if dtype not in DTYPES:
        raise refuse("packed-dtype", f"{dtype} is asked for", layout, "decode to bf16, fp16, fp32 or fp64")


def check_source(layout: str, weight: Tensor) -> None:
    """A weight to encode is floating and finite.

    Raises:
        CheckpointError: ``packed-dtype`` or ``not-finite``.
    """
    if weight.dtype not in DTYPES:
        raise refuse("packed-dtype", f"the weight is {weight.dtype}", layout, "encode bf16, fp16, fp32 or fp64")
    if not bool(torch.isfinite(weight).all()):
        raise refuse("not-finite", "the weight holds NaN or infinity", layout, "repair the weight before packing it")


def powers_of_two(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """E8M0 codes (uint8) as numbers; 255 becomes NaN."""
    ones = torch.ones(codes.shape, dtype=torch.float64, device=codes.device)
    power = torch.ldexp(ones, codes.to(torch.int32) - E8M0_BIAS)
    return torch.where(codes == E8M0_NAN, torch.nan, power).to(dtype)
