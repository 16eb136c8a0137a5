"""What RMSNorm demands of its inputs, and what a fusion that uses it must prove. No torch.

Legend: T rows, H hidden.
"""

from __future__ import annotations

from shardwright.kernels import guards
from shardwright.kernels.guards import TensorLike
from shardwright.schemas.fusion import ObligationName

NAME = "rms_norm"
DTYPES = ("bfloat16", "float16", "float32")
MAX_H = 8192
"""Widest row that stays in one program's registers without spills (sm_90 compile gate)."""

ROLES = {"x": "activation [..., H]", "weight": "parameter [H]", "y": "activation [..., H]"}

OBLIGATIONS: tuple[ObligationName, ...] = (
    "no-escaping-value",
    "no-mutation-or-alias",
    "dtype-shape-stride-device",
    "hooks",
    "lora-inside",
    "sharding-boundary",
    "reversible-layout",
    "differential-test",
)
"""Each must be ``proved`` before this operator replaces a region: nothing inside the norm is read from
outside, the weight is no LoRA target, and the op gets local tensors, never DTensors."""


def check_static(x: TensorLike, weight: TensorLike, eps: float) -> None:
    """What can be refused from shapes and dtypes alone (fake tensors too).

    Raises:
        KernelError: ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``, ``hidden-too-large`` or
            ``bad-epsilon``.
    """
    guards.one_dtype(NAME, {"x": x, "weight": weight}, DTYPES)
    guards.row_vector(NAME, x, weight, MAX_H)
    guards.epsilon(NAME, eps)


def check(x: TensorLike, weight: TensorLike, eps: float, *, interpreted: bool) -> None:
    """All guards, on real tensors. Zero rows are allowed.

    Raises:
        KernelError: as ``check_static``; also ``device-mixed``, ``device-unsupported``,
            ``not-contiguous`` or ``misaligned``.
    """
    check_static(x, weight, eps)
    guards.one_device(NAME, {"x": x, "weight": weight}, interpreted=interpreted)
    guards.dense(NAME, {"x": x, "weight": weight})
