"""What the grouped LoRA MLP demands of its inputs, and what a fusion that uses it must prove. No torch.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shardwright.kernels import guards
from shardwright.kernels.guards import BYTES, VECTOR_BYTES, TensorLike
from shardwright.schemas.fusion import ObligationName

NAME = "grouped_lora_mlp"
DTYPES = ("bfloat16", "float16", "float32")
COUNT_DTYPES = ("int32", "int64")
MAX_RANK = 256
MAX_EXPERTS = 4096
MAX_ROWS = 1 << 30

ROLES = {
    "x": "rows sorted by expert [R, H]",
    "counts": "rows of each expert [E], on the device",
    "gate_up": "frozen stack [E, F, H] (out_in) or [E, H, F] (in_out)",
    "down": "frozen stack [E, H, I] (out_in) or [E, I, H] (in_out)",
    "lora_a": "adapter [E, r, in]",
    "lora_b": "adapter [E, out, r]",
    "up_bias": "frozen bias [E, F] in the columns' order",
    "down_bias": "frozen bias [E, H]",
    "y": "rows [R, H]",
}

OBLIGATIONS: tuple[ObligationName, ...] = (
    "no-escaping-value",
    "no-mutation-or-alias",
    "no-randomness",
    "dtype-shape-stride-device",
    "tied-weights",
    "hooks",
    "lora-inside",
    "sharding-boundary",
    "reversible-layout",
    "differential-test",
)
"""The base stacks are frozen unless ``trains_base`` asks for their gradients; biases are always frozen."""

Kind = Literal["swiglu", "clamped_swiglu", "situ", "relu2", "silu"]
GATED: dict[str, bool] = {"swiglu": True, "clamped_swiglu": True, "situ": True, "relu2": False, "silu": False}


@dataclass(frozen=True)
class Activation:
    """The function between the two products; a compile-time choice of the kernels (see ``activation.py``).

    ``parameters`` are (limit, alpha, offset) of ``clamped_swiglu`` or (β₁, β₂, 0) of ``situ``; else unused.
    """

    kind: Kind = "swiglu"
    parameters: tuple[float, float, float] = (1.0, 1.0, 0.0)

    @property
    def gated(self) -> bool:
        return GATED[self.kind]


@dataclass(frozen=True)
class Layout:
    """How the stacks are stored: order of their last two dims, and of the gate and up columns."""

    order: Literal["out_in", "in_out"] = "out_in"
    interleaved: bool = False
    """Gate and up alternate (g₀ u₀ g₁ u₁ …) instead of gate first, up after."""


def check_choice(op: str, activation: Activation, layout: Layout) -> None:
    """Raises: KernelError: ``unknown-activation``, ``bad-parameter`` or ``unknown-layout``."""
    if activation.kind not in GATED:
        raise guards.refuse(op, "unknown-activation", f"{activation.kind!r}", f"use one of {', '.join(GATED)}")
    wanted = activation.parameters[: 2 if activation.kind in ("clamped_swiglu", "situ") else 0]
    if not all(math.isfinite(p) and p > 0 for p in wanted) or not math.isfinite(activation.parameters[2]):
        raise guards.refuse(op, "bad-parameter", f"{activation}", "pass finite parameters, limits and betas > 0")
    if layout.order not in ("out_in", "in_out") or (layout.interleaved and not activation.gated):
        raise guards.refuse(op, "unknown-layout", f"{layout} with {activation.kind}", "out_in or in_out, gate needed")


def check_weights(op: str, x: TensorLike, gate_up: TensorLike, down: TensorLike, gated: bool, layout: Layout) -> None:
    """Shapes and dtypes of x and the stacks; widths are whole 16-byte vectors.

    Raises:
        KernelError: ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``, ``too-many-experts``,
            ``too-many-rows`` or ``misaligned-width``.
    """
    guards.one_dtype(op, {"x": x, "gate_up": gate_up, "down": down}, DTYPES)
    shapes = f"x {list(x.shape)}, gate_up {list(gate_up.shape)}, down {list(down.shape)}"
    if len(x.shape) != 2 or len(gate_up.shape) != 3 or len(down.shape) != 3:
        raise guards.refuse(op, "wrong-shape", shapes, "pass x [R, H] and stacks of three dims")
    E, H, inner = gate_up.shape[0], x.shape[1], layout.order == "in_out"
    I = down.shape[1 if inner else 2]
    F = (2 if gated else 1) * I
    up, low = ((E, H, F), (E, I, H)) if inner else ((E, F, H), (E, H, I))
    if tuple(gate_up.shape) != up or tuple(down.shape) != low or min(E, H, I) < 1:
        raise guards.refuse(op, "wrong-shape", shapes, f"for {layout.order} pass gate_up {list(up)}, down {list(low)}")
    if E > MAX_EXPERTS:
        raise guards.refuse(op, "too-many-experts", f"{E} experts", f"at most {MAX_EXPERTS} lie on one device")
    if x.shape[0] > MAX_ROWS:
        raise guards.refuse(op, "too-many-rows", shapes, "split the batch")
    values = VECTOR_BYTES // BYTES[guards.dtype_name(x)]
    if H % values or I % values:
        what = f"H {H} and I {I} must be multiples of {values}: rows start on 16-byte boundaries"
        raise guards.refuse(op, "misaligned-width", what, "keep this module eager")


def check_adapter(op: str, role: str, a: TensorLike, b: TensorLike, sizes: tuple[int, int, int], x: TensorLike) -> None:
    """An adapter is ``a [E, r, in]`` and ``b [E, out, r]`` with 1 <= r <= 256, in x's dtype.

    Raises:
        KernelError: ``dtype-mixed`` or ``wrong-shape``.
    """
    guards.one_dtype(op, {"x": x, f"{role}.a": a, f"{role}.b": b}, DTYPES)
    E, out, into = sizes
    rank = a.shape[1] if len(a.shape) == 3 else 0
    if tuple(a.shape) != (E, rank, into) or tuple(b.shape) != (E, out, rank) or not 1 <= rank <= MAX_RANK:
        what = f"{role}: a is {list(a.shape)}, b is {list(b.shape)}"
        raise guards.refuse(op, "wrong-shape", what, f"pass a [{E}, r, {into}] and b [{E}, {out}, r], r <= {MAX_RANK}")


def check_bias(op: str, role: str, bias: TensorLike, shape: tuple[int, int], x: TensorLike) -> None:
    """A bias is ``[E, width]`` in x's dtype.

    Raises:
        KernelError: ``dtype-mixed`` or ``wrong-shape``.
    """
    guards.one_dtype(op, {"x": x, role: bias}, DTYPES)
    if tuple(bias.shape) != shape:
        raise guards.refuse(op, "wrong-shape", f"{role} is {list(bias.shape)}", f"pass one row an expert {list(shape)}")


def check_counts(op: str, counts: TensorLike, experts: int) -> None:
    """``counts`` is a dense integer ``[E]``. Its values stay on the device, where counts that
    pass R rows in all are cut.

    Raises:
        KernelError: ``dtype-unsupported``, ``wrong-shape`` or ``not-contiguous``.
    """
    guards.one_dtype(op, {"counts": counts}, COUNT_DTYPES)
    if tuple(counts.shape) != (experts,):
        raise guards.refuse(
            op, "wrong-shape", f"counts is {list(counts.shape)}", f"pass one count an expert [{experts}]"
        )
    if not counts.is_contiguous():
        raise guards.refuse(op, "not-contiguous", "counts has gaps", "pass counts.contiguous()")


def check_places(op: str, tensors: dict[str, TensorLike], *, interpreted: bool) -> None:
    """One device, dense, aligned.

    Raises:
        KernelError: ``device-mixed``, ``device-unsupported``, ``not-contiguous`` or ``misaligned``.
    """
    guards.one_device(op, tensors, interpreted=interpreted)
    guards.dense(op, tensors)
