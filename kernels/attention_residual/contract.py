"""What attention residuals demand of their inputs, and what their fusion must prove. No torch.

Legend: T tokens, R rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.kernels import guards
from shardwright.kernels.guards import TensorLike
from shardwright.kernels.rms_norm.contract import DTYPES, MAX_H
from shardwright.kernels.rms_norm.contract import OBLIGATIONS as NORM_OBLIGATIONS

NAME = "attention_residual"
MAX_ROWS = 16
"""Rows that a kernel has addresses for; Kimi K3's deepest mix reads nine."""
ROLES = {
    "row_*": "activation [..., H], R of them, the oldest first",
    "norm": "parameter [H]",
    "projection": "parameter [H] or [1, H]",
    "y": "activation [..., H]",
}
OBLIGATIONS = NORM_OBLIGATIONS
"""As RMSNorm. Rows are read where they lie; nothing is put side by side."""


def named(rows: Sequence[TensorLike]) -> dict[str, TensorLike]:
    """Rows by role."""
    return {f"row_{place}": row for place, row in enumerate(rows)}


def check_static(rows: Sequence[TensorLike], norm: TensorLike, projection: TensorLike, eps: float) -> None:
    """What can be refused from shapes and dtypes alone (fake tensors too).

    Raises:
        KernelError: ``row-count``, ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``, ``hidden-too-large`` or
            ``bad-epsilon``.
    """
    if not 1 <= len(rows) <= MAX_ROWS:
        raise guards.refuse(
            NAME, "row-count", f"{len(rows)} rows came; a mix reads 1 to {MAX_ROWS}", "keep this mix eager"
        )
    guards.one_dtype(NAME, {**named(rows), "norm": norm, "projection": projection}, DTYPES)
    guards.same_shape(NAME, named(rows))
    guards.row_vector(NAME, rows[0], norm, MAX_H)
    H = norm.shape[0]
    if tuple(projection.shape) not in ((H,), (1, H)):
        found = f"projection is {list(projection.shape)}, norm [{H}]"
        raise guards.refuse(NAME, "wrong-shape", found, "pass projection [H] or [1, H]")
    guards.epsilon(NAME, eps)


def check(
    rows: Sequence[TensorLike], norm: TensorLike, projection: TensorLike, eps: float, *, interpreted: bool
) -> None:
    """All guards, on real tensors. Zero tokens are allowed.

    Raises:
        KernelError: as ``check_static``; also ``device-mixed``, ``device-unsupported``, ``not-contiguous`` or
            ``misaligned``.
    """
    check_static(rows, norm, projection, eps)
    tensors = {**named(rows), "norm": norm, "projection": projection}
    guards.one_device(NAME, tensors, interpreted=interpreted)
    guards.dense(NAME, tensors)
