"""What gated RMSNorm demands of its inputs, and what a fusion that uses it must prove. No torch.

Legend: D row width.
"""

from __future__ import annotations

from shardwright.kernels import guards
from shardwright.kernels.admitted import Strided
from shardwright.kernels.gated_rms_norm import rows
from shardwright.kernels.guards import TensorLike, dtype_name, refuse
from shardwright.kernels.rms_norm.contract import DTYPES
from shardwright.kernels.rms_norm.contract import OBLIGATIONS as NORM_OBLIGATIONS

NAME = "gated_rms_norm"
MAX_D = 8192
"""Widest row that stays in one program's registers without spills (sm_90 compile gate)."""
MAX_ROWS = (1 << 31) - (1 << 16)
"""Rows are counted in 32 bits; addresses are 64-bit."""

ACTIVATIONS = ("sigmoid", "silu")
ROLES = {
    "x": "activation [..., D]",
    "gate": "activation [..., D]",
    "weight": "parameter [D]",
    "y": "activation [..., D]",
}
OBLIGATIONS = NORM_OBLIGATIONS
"""As RMSNorm. The activated gate is read by nothing else."""


def check_static(x: TensorLike, gate: TensorLike, weight: TensorLike, eps: float, activation: str) -> None:
    """What can be refused from shapes and dtypes alone (fake tensors too).

    Raises:
        KernelError: ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``, ``hidden-too-large``,
            ``bad-epsilon`` or ``unknown-activation``.
    """
    guards.one_dtype(NAME, {"x": x, "gate": gate}, DTYPES)
    if dtype_name(weight) not in (dtype_name(x), "float32"):
        found = f"x is {dtype_name(x)}, weight is {dtype_name(weight)}"
        raise refuse(NAME, "dtype-mixed", found, "keep the weight in fp32 or cast it to x's dtype")
    if len(x.shape) != len(gate.shape) or any(a != b for a, b in zip(x.shape, gate.shape, strict=True)):
        found = f"x is {list(x.shape)}, gate is {list(gate.shape)}"
        raise refuse(NAME, "wrong-shape", found, "pass a gate for every value of x")
    guards.row_vector(NAME, x, weight, MAX_D)
    guards.epsilon(NAME, eps)
    if activation not in ACTIVATIONS:
        known = " or ".join(ACTIVATIONS)
        raise refuse(NAME, "unknown-activation", f"the gate's activation is {activation!r}", f"use {known}")


def check(x: Strided, gate: Strided, weight: Strided, eps: float, activation: str, *, interpreted: bool) -> None:
    """All guards, on real tensors. Zero rows are allowed; x and gate may be strided between rows.

    Raises:
        KernelError: as ``check_static``; also ``device-mixed``, ``device-unsupported``,
            ``not-contiguous``, ``misaligned``, ``row-layout`` or ``too-many-rows``.
    """
    check_static(x, gate, weight, eps, activation)
    guards.one_device(NAME, {"x": x, "gate": gate, "weight": weight}, interpreted=interpreted)
    guards.dense(NAME, {"weight": weight})
    for role, tensor in (("x", x), ("gate", gate)):
        dense_rows(NAME, role, tensor)


def dense_rows(op: str, role: str, tensor: Strided) -> None:
    """Values of a row are neighbours, the first row starts on a 16-byte boundary, rows can be counted.

    Raises:
        KernelError: ``not-contiguous``, ``misaligned``, ``row-layout`` or ``too-many-rows``.
    """
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    count = 1
    for size in shape[:-1]:
        count *= size
    if count == 0:
        return
    if strides[-1] != 1 and shape[-1] != 1:
        raise refuse(op, "not-contiguous", f"{role} has gaps inside its rows", f"pass {role}.contiguous()")
    if tensor.data_ptr() % guards.VECTOR_BYTES:
        offset = tensor.data_ptr() % guards.VECTOR_BYTES
        what = f"{role} starts {offset} bytes past a 16-byte boundary"
        raise refuse(op, "misaligned", what, f"pass {role}.clone()")
    if count > MAX_ROWS:
        raise refuse(op, "too-many-rows", f"{role} has {count} rows, at most {MAX_ROWS}", "split the batch")
    rows.row_steps(op, role, shape, strides)
