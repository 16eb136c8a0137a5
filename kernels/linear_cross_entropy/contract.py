"""What head and cross-entropy demand of their inputs, and what a fusion that uses them must prove. No torch.

Labels are data on the device, so their range is not a guard: see ``labels``.

Legend: T tokens, H hidden, V vocabulary, r LoRA rank.
"""

from __future__ import annotations

import math

from shardwright.kernels import guards
from shardwright.kernels.guards import TensorLike
from shardwright.schemas.fusion import ObligationName

NAME = "linear_cross_entropy"
DTYPES = ("bfloat16", "float16", "float32")
TARGET_DTYPES = ("int64",)
TOKEN_DTYPES = ("int64", "float32")
REDUCTIONS = ("mean", "sum", "none")

ROLES = {
    "x": "activation [..., H]",
    "weight": "frozen parameter [V, H]",
    "targets": "labels [...], already shifted",
    "tokens": "what a mean divides by, one value, optional",
    "lora_a": "parameter [r, H], optional",
    "lora_b": "parameter [V, r], optional",
    "loss": "fp32 scalar, or [...] where nothing is reduced",
}

OBLIGATIONS: tuple[ObligationName, ...] = (
    "no-escaping-value",
    "no-mutation-or-alias",
    "dtype-shape-stride-device",
    "tied-weights",
    "hooks",
    "lora-inside",
    "sharding-boundary",
    "differential-test",
)
"""Each must be ``proved`` before this operator replaces head and loss: nobody else reads the logits, the
head (and an embedding tied to it) is frozen, and the op gets whole local tensors."""


def check_static(
    x: TensorLike,
    weight: TensorLike,
    targets: TensorLike,
    lora_a: TensorLike | None,
    lora_b: TensorLike | None,
    tokens: TensorLike | None = None,
    *,
    lora_scale: float,
    reduction: str,
    weight_learns: bool = False,
    lora_learns: bool = False,
) -> None:
    """What can be refused from shapes, dtypes and flags alone (fake tensors too).

    Raises:
        KernelError: ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``, ``bad-reduction``,
            ``weight-learns``, ``lora-incomplete``, ``bad-scale`` or ``reduction-unsupported``.
    """
    guards.one_dtype(NAME, {"x": x, "weight": weight}, DTYPES)
    guards.one_dtype(NAME, {"targets": targets}, TARGET_DTYPES)
    sizes = (*weight.shape,)
    if len(sizes) != 2 or min(sizes) < 1 or len(x.shape) < 1 or x.shape[-1] != sizes[1]:
        what = f"x is {list(x.shape)}, weight is {list(weight.shape)}"
        raise guards.refuse(NAME, "wrong-shape", what, "pass x [..., H] and weight [V, H]")
    if tuple(targets.shape) != tuple(x.shape[:-1]):
        what = f"targets are {list(targets.shape)}, x is {list(x.shape)}"
        raise guards.refuse(NAME, "wrong-shape", what, "pass one label for each row of x")
    if reduction not in REDUCTIONS:
        raise guards.refuse(NAME, "bad-reduction", f"reduction is {reduction!r}", f"use one of {', '.join(REDUCTIONS)}")
    if weight_learns:
        what = "the head requires a gradient; this operator computes none for it"
        raise guards.refuse(NAME, "weight-learns", what, "freeze the head (LoRA on it is fine), or keep eager")
    if tokens is not None:
        _check_tokens(tokens, reduction)
    _check_lora(x, sizes, lora_a, lora_b, lora_scale)
    if lora_learns and reduction == "none":
        what = "reduction is 'none' and LoRA learns: its gradient needs the weight of each row before the sum"
        raise guards.refuse(NAME, "reduction-unsupported", what, "use 'sum' or 'mean', or keep this loss eager")


def _check_tokens(tokens: TensorLike, reduction: str) -> None:
    guards.one_dtype(NAME, {"tokens": tokens}, TOKEN_DTYPES)
    if math.prod(tokens.shape) != 1:
        raise guards.refuse(NAME, "wrong-shape", f"tokens are {list(tokens.shape)}", "pass one value")
    if reduction != "mean":
        what = f"tokens are given and reduction is {reduction!r}"
        raise guards.refuse(NAME, "bad-reduction", what, "use 'mean': only a mean divides by them")


def _check_lora(
    x: TensorLike, head: tuple[int, ...], lora_a: TensorLike | None, lora_b: TensorLike | None, lora_scale: float
) -> None:
    if lora_a is None and lora_b is None:
        return
    if lora_a is None or lora_b is None:
        missing = "lora_a" if lora_a is None else "lora_b"
        raise guards.refuse(NAME, "lora-incomplete", f"{missing} is missing", "pass both LoRA factors, or neither")
    for role, factor in (("lora_a", lora_a), ("lora_b", lora_b)):
        guards.one_dtype(NAME, {role: factor}, (guards.dtype_name(x), "float32"))
    a, b = tuple(lora_a.shape), tuple(lora_b.shape)
    if len(a) != 2 or len(b) != 2 or a[0] < 1 or a[0] != b[1] or a[1] != head[1] or b[0] != head[0]:
        what = f"lora_a is {list(a)}, lora_b is {list(b)}, weight is {list(head)}"
        raise guards.refuse(NAME, "wrong-shape", what, "pass lora_a [r, H] and lora_b [V, r]")
    if not math.isfinite(lora_scale):
        raise guards.refuse(NAME, "bad-scale", f"lora_scale is {lora_scale!r}", "pass alpha / rank, a finite number")


def check(
    x: TensorLike,
    weight: TensorLike,
    targets: TensorLike,
    lora_a: TensorLike | None,
    lora_b: TensorLike | None,
    tokens: TensorLike | None = None,
    *,
    interpreted: bool,
) -> None:
    """Guards that need real tensors; ``check_static`` comes first. Zero rows are allowed.

    Raises:
        KernelError: ``device-mixed``, ``device-unsupported``, ``not-contiguous`` or ``misaligned``.
    """
    wide = {"x": x, "weight": weight}
    if lora_a is not None and lora_b is not None:
        wide |= {"lora_a": lora_a, "lora_b": lora_b}
    everything = {**wide, "targets": targets} if tokens is None else {**wide, "targets": targets, "tokens": tokens}
    guards.one_device(NAME, everything, interpreted=interpreted)
    guards.dense(NAME, wide)
    if not targets.is_contiguous():
        what = "targets have gaps or a permuted layout"
        raise guards.refuse(NAME, "not-contiguous", what, "pass targets.contiguous()")
