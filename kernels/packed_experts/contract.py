"""What the packed experts demand of their inputs, and what a fusion that uses them must prove. No torch.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank, N out and K in of a stack.
"""

from __future__ import annotations

from typing import Literal, Protocol

from shardwright.kernels import guards
from shardwright.kernels.grouped_lora_mlp.contract import MAX_EXPERTS, MAX_ROWS, Activation
from shardwright.kernels.guards import TensorLike
from shardwright.schemas.fusion import ObligationName

NAME = "packed_experts"
DTYPES = ("bfloat16",)
"""Codes decode to bf16, so rows are bf16 too."""

Kind = Literal["mxfp4", "fp8"]
WHOLE: dict[str, int] = {"mxfp4": 64, "fp8": 128}
"""H and I are multiples of this: two groups that share bytes, or one block."""
VALUES: dict[str, str] = {"mxfp4": "uint8", "fp8": "float8_e4m3fn"}
SCALES: dict[str, str] = {"mxfp4": "int16", "fp8": "float32"}

ROLES = {
    "x": "rows sorted by expert [R, H]",
    "counts": "rows of each expert [E], on the device",
    "gate_up": "packed frozen stack [E, F, H]",
    "down": "packed frozen stack [E, H, I]",
    "lora_a": "adapter [E, r, in]",
    "lora_b": "adapter [E, out, r]",
    "up_bias": "frozen bias [E, F] in the rows' order",
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
"""The base must be frozen and packed, biases frozen; the kernels' byte order is a reversible layout (``storage``)."""


class StackLike(Protocol):
    """What a guard looks at."""

    @property
    def values(self) -> TensorLike: ...
    @property
    def scales(self) -> TensorLike: ...
    @property
    def kind(self) -> str: ...


def shapes(kind: str, E: int, N: int, K: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a stack's values and scales for a logical weight [E, N, K]."""
    if kind == "mxfp4":
        return (E, N, K // 2), (E, K // WHOLE[kind], N)
    return (E, N, K), (E, N // WHOLE[kind], K // WHOLE[kind])


def check_stack(op: str, role: str, stack: StackLike, E: int, N: int, K: int) -> None:
    """A stack is one of the known kinds and holds a weight [E, N, K].

    Raises:
        KernelError: ``unknown-packing``, ``dtype-unsupported`` or ``wrong-shape``.
    """
    if stack.kind not in WHOLE:
        raise guards.refuse(op, "unknown-packing", f"{role} is {stack.kind!r}", f"use one of {', '.join(WHOLE)}")
    guards.one_dtype(op, {f"{role} values": stack.values}, (VALUES[stack.kind],))
    guards.one_dtype(op, {f"{role} scales": stack.scales}, (SCALES[stack.kind],))
    found = tuple(stack.values.shape), tuple(stack.scales.shape)
    wanted = shapes(stack.kind, E, N, K)
    if found != wanted:
        what = f"{role}: values {list(found[0])}, scales {list(found[1])}"
        raise guards.refuse(op, "wrong-shape", what, f"for [{E}, {N}, {K}] pass {list(wanted[0])}, {list(wanted[1])}")


def check_inputs(
    op: str, x: TensorLike, gate_up: StackLike, down: StackLike, activation: Activation, interleaved: bool
) -> None:
    """Shapes and dtypes of x and the stacks.

    Raises:
        KernelError: ``dtype-unsupported``, ``wrong-shape``, ``unknown-packing``, ``unknown-layout``,
            ``too-many-experts``, ``too-many-rows`` or ``misaligned-width``.
    """
    guards.one_dtype(op, {"x": x}, DTYPES)
    if gate_up.kind != down.kind or gate_up.kind not in WHOLE:
        what = f"gate_up is {gate_up.kind!r}, down is {down.kind!r}"
        raise guards.refuse(op, "unknown-packing", what, f"pack both stacks as one of {', '.join(WHOLE)}")
    if len(x.shape) != 2 or len(gate_up.values.shape) != 3 or len(down.values.shape) != 3:
        what = f"x {list(x.shape)}, gate_up {list(gate_up.values.shape)}, down {list(down.values.shape)}"
        raise guards.refuse(op, "wrong-shape", what, "pass x [R, H] and stacks of three dims")
    E, H = gate_up.values.shape[0], x.shape[1]
    I = down.values.shape[2] * (2 if down.kind == "mxfp4" else 1)
    whole = WHOLE[down.kind]
    if H % whole or I % whole or min(E, H, I) < 1:
        what = f"E {E}, H {H} and I {I} with {down.kind}"
        raise guards.refuse(op, "misaligned-width", what, f"H and I are multiples of {whole}; else dequantise")
    if interleaved and (not activation.gated or down.kind == "fp8"):
        what = f"interleaved columns with {activation.kind} and {down.kind}"
        raise guards.refuse(op, "unknown-layout", what, "interleaved needs a gate and scales of single rows (mxfp4)")
    check_stack(op, "gate_up", gate_up, E, (2 if activation.gated else 1) * I, H)
    check_stack(op, "down", down, E, H, I)
    if E > MAX_EXPERTS:
        raise guards.refuse(op, "too-many-experts", f"{E} experts", f"at most {MAX_EXPERTS} lie on one device")
    if x.shape[0] > MAX_ROWS:
        raise guards.refuse(op, "too-many-rows", f"{x.shape[0]} rows", "split the batch")
