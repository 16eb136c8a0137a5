"""What query/key norm + RoPE demands of its inputs, and what its fusion must prove. No torch.

Legend: B batch, T tokens, Q and K heads, D head width, W rotary width.
"""

from __future__ import annotations

from shardwright.kernels import guards
from shardwright.kernels.admitted import Strided
from shardwright.kernels.gated_rms_norm.contract import dense_rows
from shardwright.kernels.guards import TensorLike, dtype_name, refuse
from shardwright.kernels.rms_norm.contract import DTYPES
from shardwright.kernels.rms_norm.contract import OBLIGATIONS as NORM_OBLIGATIONS

NAME = "qk_norm_rope"
MAX_D = 512
"""Widest head whose row stays in one program's registers without spills (sm_90 compile gate)."""

PAIRINGS = ("half", "interleaved", "interleaved-to-half")
ROLES = {
    "q": "activation [B, T, Q, D]",
    "k": "activation [B, T, K, D]",
    "cos": "table [B, T, W]",
    "sin": "table [B, T, W]",
    "q_weight": "parameter [D]",
    "k_weight": "parameter [D]",
    "q_rotated": "activation [B, T, Q, D]",
    "k_rotated": "activation [B, T, K, D]",
}
OBLIGATIONS = NORM_OBLIGATIONS
"""As RMSNorm. The normalised queries and keys are read by the rotation alone; nothing is written in place."""


def check_static(
    q: TensorLike,
    k: TensorLike,
    cos: TensorLike,
    sin: TensorLike,
    q_weight: TensorLike | None,
    k_weight: TensorLike | None,
    eps: float | None,
    width: int,
    pairing: str,
) -> None:
    """What can be refused from shapes and dtypes alone (fake tensors too).

    Raises:
        KernelError: ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``, ``hidden-too-large``,
            ``bad-epsilon``, ``one-weight``, ``rotary-width``, ``unknown-pairing`` or ``table-shape``.
    """
    guards.one_dtype(NAME, {"q": q, "k": k}, DTYPES)
    check_heads(q, k)
    check_weights(q, k, q_weight, k_weight, eps)
    if pairing not in PAIRINGS:
        raise refuse(NAME, "unknown-pairing", f"pairing is {pairing!r}", f"use {' or '.join(PAIRINGS)}")
    narrow = min(int(q.shape[-1]), int(k.shape[-1]))
    if width % 2 or not 2 <= width <= narrow:
        what = f"rotary width is {width}, the narrower head has {narrow} dimensions"
        raise refuse(NAME, "rotary-width", what, "pass an even width of at least 2 that fits in both heads")
    check_tables(q, cos, sin, width)


def check_heads(q: TensorLike, k: TensorLike) -> None:
    """Queries and keys are ``[T, heads, D]`` or ``[B, T, heads, D]`` of the same tokens.

    Raises:
        KernelError: ``wrong-shape`` or ``hidden-too-large``.
    """
    q_shape, k_shape = tuple(q.shape), tuple(k.shape)
    tokens = q_shape[:-2], k_shape[:-2]
    alike = len(q_shape) == len(k_shape) and all(a == b for a, b in zip(*tokens, strict=False))
    if len(q_shape) not in (3, 4) or not alike or min(*q_shape[-2:], *k_shape[-2:]) < 1:
        found = f"q is {list(q_shape)}, k is {list(k_shape)}"
        raise refuse(NAME, "wrong-shape", found, "pass [T, heads, D] or [B, T, heads, D] of the same tokens")
    if max(q_shape[-1], k_shape[-1]) > MAX_D:
        what = f"heads are {q_shape[-1]} and {k_shape[-1]} wide; one must fit in registers (D <= {MAX_D})"
        raise refuse(NAME, "hidden-too-large", what, "keep this module eager or use torch.compile for it")


def check_weights(
    q: TensorLike, k: TensorLike, q_weight: TensorLike | None, k_weight: TensorLike | None, eps: float | None
) -> None:
    """Both norms or none; each weight fits its heads; eps comes with the norms and only with them.

    Raises:
        KernelError: ``one-weight``, ``wrong-shape``, ``dtype-mixed`` or ``bad-epsilon``.
    """
    if (q_weight is None) != (k_weight is None):
        given = "q_weight" if k_weight is None else "k_weight"
        raise refuse(NAME, "one-weight", f"only {given} is given", "norm both or none here; norm one with rms_norm")
    if q_weight is None or k_weight is None:
        if eps is not None:
            raise refuse(NAME, "bad-epsilon", f"eps is {eps!r} but no norm is asked for", "pass weights, or no eps")
        return
    guards.epsilon(NAME, float("nan") if eps is None else eps)
    for role, weight, x in (("q_weight", q_weight, q), ("k_weight", k_weight, k)):
        if len(weight.shape) != 1 or weight.shape[0] != x.shape[-1]:
            found = f"{role} is {list(weight.shape)}, its heads are {x.shape[-1]} wide"
            raise refuse(NAME, "wrong-shape", found, "pass one weight for each dimension of a head")
        if dtype_name(weight) not in (dtype_name(x), "float32"):
            found = f"{role} is {dtype_name(weight)}, its heads are {dtype_name(x)}"
            raise refuse(NAME, "dtype-mixed", found, "keep the weight in fp32 or cast it to the heads' dtype")
    if dtype_name(q_weight) != dtype_name(k_weight):
        found = f"q_weight is {dtype_name(q_weight)}, k_weight is {dtype_name(k_weight)}"
        raise refuse(NAME, "dtype-mixed", found, "keep both weights in one dtype")


def check_tables(q: TensorLike, cos: TensorLike, sin: TensorLike, width: int) -> None:
    """cos and sin are alike, W or W/2 wide, one row for each token, for one batch or each.

    Raises:
        KernelError: ``dtype-mixed``, ``dtype-unsupported`` or ``table-shape``.
    """
    guards.one_dtype(NAME, {"cos": cos, "sin": sin}, DTYPES)
    shape, other, lead = tuple(cos.shape), tuple(sin.shape), tuple(q.shape[:-2])
    alike = len(shape) == len(other) and all(a == b for a, b in zip(shape, other, strict=False))
    fits = alike and 2 <= len(shape) <= 3 and shape[-1] in (width, width // 2) and shape[-2] == lead[-1]
    if fits and len(shape) == 3:
        fits = shape[0] == 1 or (len(lead) == 2 and shape[0] == lead[0])
    if not fits:
        found = f"cos is {list(shape)}, sin is {list(other)}, q is {list(q.shape)}, rotary width {width}"
        raise refuse(NAME, "table-shape", found, "pass [T, W], [T, W/2] or the same with one row of batches in front")


def check(
    q: Strided,
    k: Strided,
    cos: Strided,
    sin: Strided,
    q_weight: Strided | None,
    k_weight: Strided | None,
    eps: float | None,
    width: int,
    pairing: str,
    *,
    interpreted: bool,
) -> None:
    """All guards, on real tensors. Zero tokens are allowed; q, k and tables may be strided between rows.

    Raises:
        KernelError: as ``check_static``; also ``device-mixed``, ``device-unsupported``,
            ``not-contiguous``, ``misaligned``, ``too-many-rows`` or ``table-needs-gradient``.
    """
    check_static(q, k, cos, sin, q_weight, k_weight, eps, width, pairing)
    rows: dict[str, Strided] = {"q": q, "k": k, "cos": cos, "sin": sin}
    weights = {} if q_weight is None or k_weight is None else {"q_weight": q_weight, "k_weight": k_weight}
    guards.one_device(NAME, {**rows, **weights}, interpreted=interpreted)
    guards.dense(NAME, weights)
    for role, tensor in rows.items():
        dense_rows(NAME, role, tensor)
    refuse_learning_tables(cos, sin)


def refuse_learning_tables(cos: TensorLike, sin: TensorLike) -> None:
    """A table that wants a gradient would silently get none.

    Raises:
        KernelError: ``table-needs-gradient``.
    """
    if getattr(cos, "requires_grad", False) or getattr(sin, "requires_grad", False):
        what = "cos or sin requires a gradient, which this operator does not give"
        raise refuse(NAME, "table-needs-gradient", what, "detach the tables, or keep this module eager")
