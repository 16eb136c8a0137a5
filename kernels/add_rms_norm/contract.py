"""What residual add + RMSNorm demands of its inputs, and what its fusion must prove. No torch.

Legend: T rows, H hidden.
"""

from __future__ import annotations

from shardwright.kernels import guards
from shardwright.kernels.guards import TensorLike
from shardwright.kernels.rms_norm.contract import DTYPES, MAX_H
from shardwright.kernels.rms_norm.contract import OBLIGATIONS as NORM_OBLIGATIONS

NAME = "add_rms_norm"
ROLES = {
    "x": "activation [..., H]",
    "residual": "activation [..., H]",
    "weight": "parameter [H]",
    "y": "activation [..., H]",
    "new_residual": "activation [..., H]",
}
OBLIGATIONS = NORM_OBLIGATIONS
"""As RMSNorm. The sum is an output, so code outside the region may read it."""


def check_static(x: TensorLike, residual: TensorLike, weight: TensorLike, eps: float) -> None:
    """What can be refused from shapes and dtypes alone (fake tensors too).

    Raises:
        KernelError: ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``, ``hidden-too-large`` or
            ``bad-epsilon``.
    """
    guards.one_dtype(NAME, {"x": x, "residual": residual, "weight": weight}, DTYPES)
    guards.same_shape(NAME, {"x": x, "residual": residual})
    guards.row_vector(NAME, x, weight, MAX_H)
    guards.epsilon(NAME, eps)


def check(x: TensorLike, residual: TensorLike, weight: TensorLike, eps: float, *, interpreted: bool) -> None:
    """All guards, on real tensors. Zero rows are allowed.

    Raises:
        KernelError: as ``check_static``; also ``device-mixed``, ``device-unsupported``,
            ``not-contiguous`` or ``misaligned``.
    """
    check_static(x, residual, weight, eps)
    tensors = {"x": x, "residual": residual, "weight": weight}
    guards.one_device(NAME, tensors, interpreted=interpreted)
    guards.dense(NAME, tensors)
