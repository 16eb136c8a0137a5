"""What the lightning indexer demands of its inputs, and what a fusion that uses it must prove. No torch.

NaN policy: a NaN score ranks above every number, the smaller key first, and the typed error ``nan-scores``
follows (see ``alarms``). A row that takes all its keys looks at no score.

Legend: T queries, S keys, N indexer heads, D head width, k chosen keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwright.kernels import guards
from shardwright.kernels.guards import TensorLike
from shardwright.schemas.fusion import ObligationName

NAME = "dsa_indexer"
DTYPES = ("bfloat16", "float16", "float32")
"""fp32 of q and k only under the interpreter: matrix units would round it. Weights may be fp32 everywhere."""

INDEX_DTYPES = ("int32",)
LENGTH_DTYPES = ("int32", "int64")
WIDTHS = (16, 32, 64, 128)
MAX_HEADS = 64
MAX_CHOSEN = 2048
MAX_KEYS = 1 << 30
LAYOUTS = ("interleaved", "half-split")
PRECISIONS = ("exact", "fp8")

ROLES = {
    "q": "activation [T, N, D]",
    "k": "activation [S, D], one key head",
    "weights": "activation [T, N]",
    "cu_seqlens": "bounds of packed sequences [B + 1], optional",
    "cos": "table [S, R / 2] fp32, optional",
    "sin": "table [S, R / 2] fp32, optional",
    "indices": "chosen keys [T, k] int32, ascending, -1 at the end",
    "scores": "fp32 [T, k], differentiable, optional",
}

OBLIGATIONS: tuple[ObligationName, ...] = (
    "no-escaping-value",
    "no-mutation-or-alias",
    "no-randomness",
    "dtype-shape-stride-device",
    "hooks",
    "lora-inside",
    "sharding-boundary",
    "differential-test",
)
"""Each must be ``proved`` before this operator replaces an indexer's scoring and choice; the projections and the
norm of the keys stay outside."""


def check_scored(q: TensorLike, k: TensorLike, weights: TensorLike, name: str = NAME) -> None:
    """Shapes and dtypes of what scores are made of (fake tensors too).

    Raises:
        KernelError: ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``, ``bad-head-count`` or
            ``bad-head-dim``.
    """
    guards.one_dtype(name, {"q": q, "k": k}, DTYPES)
    guards.one_dtype(name, {"weights": weights}, DTYPES)
    shapes = [list(tensor.shape) for tensor in (q, k, weights)]
    if [len(s) for s in shapes] != [3, 2, 2] or q.shape[2] != k.shape[1] or weights.shape[0] != q.shape[0]:
        what = f"q is {shapes[0]}, k is {shapes[1]}, weights are {shapes[2]}"
        raise guards.refuse(name, "wrong-shape", what, "pass q [T, N, D], k [S, D] and weights [T, N]")
    N, D = q.shape[1], q.shape[2]
    if not 1 <= N <= MAX_HEADS or weights.shape[1] != N:
        what = f"q has {N} heads, weights have {weights.shape[1]}"
        raise guards.refuse(name, "bad-head-count", what, f"use the same 1 to {MAX_HEADS} heads in both")
    if D not in WIDTHS:
        raise guards.refuse(name, "bad-head-dim", f"D is {D}", f"use one of {', '.join(map(str, WIDTHS))}")
    if k.shape[0] > MAX_KEYS:
        raise guards.refuse(name, "too-many-keys", f"{k.shape[0]} keys", f"use at most {MAX_KEYS}")


def check_static(
    q: TensorLike,
    k: TensorLike,
    weights: TensorLike,
    *,
    top_k: int,
    query_start: int,
    scale: float,
    precision: str = "exact",
    name: str = NAME,
) -> None:
    """What can be refused from shapes, dtypes and settings alone (fake tensors too).

    Raises:
        KernelError: what ``check_scored`` raises, ``bad-top-k``, ``bad-query-start``, ``bad-scale`` or
            ``bad-precision``.
    """
    check_scored(q, k, weights, name)
    if not 1 <= top_k <= MAX_CHOSEN:
        raise guards.refuse(name, "bad-top-k", f"top_k is {top_k}", f"use 1 to {MAX_CHOSEN}")
    check_place(q, k, query_start, name)
    if not (math.isfinite(scale) and scale > 0):
        raise guards.refuse(name, "bad-scale", f"scale is {scale!r}", "pass a positive number: it keeps the order")
    if precision not in PRECISIONS:
        raise guards.refuse(name, "bad-precision", f"precision is {precision!r}", f"use one of {PRECISIONS}")


def check_place(q: TensorLike, k: TensorLike, query_start: int, name: str = NAME) -> None:
    """Every query has its own key: query t stands at position ``query_start + t`` of the keys.

    Raises:
        KernelError: ``bad-query-start``.
    """
    T, S = q.shape[0], k.shape[0]
    if query_start < 0 or query_start + T > S:
        what = f"{T} queries from position {query_start} on, and {S} keys"
        raise guards.refuse(name, "bad-query-start", what, "gather all keys up to the last query's own")


def check_rope(k: TensorLike, cos: TensorLike | None, sin: TensorLike | None, layout: str, name: str = NAME) -> None:
    """Both tables or none, one row a key, at most as wide as a head.

    Raises:
        KernelError: ``bad-rope`` or ``dtype-unsupported``.
    """
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise guards.refuse(name, "bad-rope", "one table of cos and sin is missing", "pass both, or neither")
    guards.one_dtype(name, {"cos": cos, "sin": sin}, ("float32",))
    shapes = {tuple(cos.shape), tuple(sin.shape)}
    half = cos.shape[-1]
    if shapes != {(k.shape[0], half)} or half < 1 or half & (half - 1) or 2 * half > k.shape[1]:
        what = f"cos is {list(cos.shape)}, sin is {list(sin.shape)}, k is {list(k.shape)}"
        raise guards.refuse(name, "bad-rope", what, "pass cos and sin [S, R / 2], R a power of two and at most D")
    if layout not in LAYOUTS:
        raise guards.refuse(name, "bad-rope", f"layout is {layout!r}", f"use one of {', '.join(LAYOUTS)}")


def check_lengths(bounds: Sequence[int], S: int, name: str = NAME) -> None:
    """Bounds of packed sequences start at 0, never fall, and end at S.

    Raises:
        KernelError: ``bad-cu-seqlens``.
    """
    falls = next((at for at in range(1, len(bounds)) if bounds[at] < bounds[at - 1]), None)
    if falls is not None:
        what = f"cu_seqlens falls from {bounds[falls - 1]} to {bounds[falls]} at {falls}"
        raise guards.refuse(name, "bad-cu-seqlens", what, "pass cumulative lengths, sorted")
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != S:
        what = f"cu_seqlens has {len(bounds)} entries from {bounds[0] if bounds else '-'} to " + (
            f"{bounds[-1]}" if bounds else "-"
        )
        raise guards.refuse(name, "bad-cu-seqlens", what, f"begin with 0 and end with the number of keys, {S}")


def check_length_tensor(cu_seqlens: TensorLike, name: str = NAME) -> None:
    """A vector of integers.

    Raises:
        KernelError: ``bad-cu-seqlens`` or ``dtype-unsupported``.
    """
    guards.one_dtype(name, {"cu_seqlens": cu_seqlens}, LENGTH_DTYPES)
    if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 2:
        what = f"cu_seqlens is {list(cu_seqlens.shape)}"
        raise guards.refuse(name, "bad-cu-seqlens", what, "pass B + 1 cumulative lengths")


def check_selection(q: TensorLike, indices: TensorLike, name: str = NAME) -> None:
    """Indices are ``[T, k]`` int32.

    Raises:
        KernelError: ``dtype-unsupported``, ``wrong-shape`` or ``bad-top-k``.
    """
    guards.one_dtype(name, {"indices": indices}, INDEX_DTYPES)
    if len(indices.shape) != 2 or indices.shape[0] != q.shape[0]:
        what = f"indices are {list(indices.shape)}, q is {list(q.shape)}"
        raise guards.refuse(name, "wrong-shape", what, "pass indices [T, k]")
    if not 1 <= indices.shape[1] <= MAX_CHOSEN:
        raise guards.refuse(name, "bad-top-k", f"{indices.shape[1]} keys a query", f"use 1 to {MAX_CHOSEN}")


def check(tensors: Mapping[str, TensorLike], *, interpreted: bool, name: str = NAME) -> None:
    """Guards that need real tensors. Zero rows are allowed.

    Raises:
        KernelError: ``device-mixed``, ``device-unsupported``, ``dtype-unsupported``, ``not-contiguous`` or
            ``misaligned``.
    """
    if not interpreted:
        guards.one_dtype(name, {"q": tensors["q"]}, DTYPES[:2])
    guards.one_device(name, tensors, interpreted=interpreted)
    guards.dense(name, tensors)
