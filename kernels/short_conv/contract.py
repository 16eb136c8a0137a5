"""What the short convolution demands of its inputs. No torch.

Legend: B batch, T tokens, C channels, J taps, N documents.
"""

from __future__ import annotations

from shardwright.kernels.guards import TensorLike, dtype_name, refuse
from shardwright.kernels.rms_norm.contract import OBLIGATIONS as NORM_OBLIGATIONS

NAME = "short_conv"
DTYPES = ("bfloat16", "float16", "float32")
TAPS = (2, 3, 4, 5, 6, 7, 8)
MAX_TOKENS = 1 << 30

ROLES = {
    "x": "activation [B, T, C]",
    "weight": "parameter [C, J]",
    "initial": "activation [N, C, J - 1]",
    "y": "activation [B, T, C]",
}
OBLIGATIONS = NORM_OBLIGATIONS
"""As RMSNorm."""


def check_static(x: TensorLike, weight: TensorLike, initial: TensorLike | None, *, count: int) -> None:
    """What can be refused from shapes and dtypes alone (fake tensors too).

    Args:
        count: number of documents.

    Raises:
        KernelError: ``dtype-unsupported``, ``wrong-shape``, ``taps-unsupported``, ``no-tokens`` or
            ``too-many-tokens``.
    """
    for role, tensor in {"x": x, "weight": weight, "initial": initial}.items():
        if tensor is not None and dtype_name(tensor) not in DTYPES:
            what = f"{role} is {dtype_name(tensor)}"
            raise refuse(NAME, "dtype-unsupported", what, f"use one of {', '.join(DTYPES)}")
    if len(x.shape) != 3 or len(weight.shape) != 2:
        what = f"x is {list(x.shape)}, weight is {list(weight.shape)}"
        raise refuse(NAME, "wrong-shape", what, "pass x [B, T, C] and weight [C, J]")
    B, T, C = x.shape
    J = weight.shape[1]
    if weight.shape[0] != C:
        what = f"weight has {weight.shape[0]} channels, x has {C}"
        raise refuse(NAME, "wrong-shape", what, "pass one row of taps for each channel")
    if J not in TAPS:
        raise refuse(NAME, "taps-unsupported", f"{J} taps", f"use {TAPS[0]} to {TAPS[-1]}")
    if initial is not None and tuple(initial.shape) != (count, C, J - 1):
        what = f"initial is {list(initial.shape)}, expected {[count, C, J - 1]}"
        raise refuse(NAME, "wrong-shape", what, "pass the last J - 1 inputs before each document")
    if T < 1 or B < 1 or C < 1:
        raise refuse(NAME, "no-tokens", f"B is {B}, T is {T}, C is {C}", "skip the layer for an empty batch")
    if B * T > MAX_TOKENS:
        raise refuse(NAME, "too-many-tokens", f"{B * T} tokens, at most {MAX_TOKENS}", "split the batch")
