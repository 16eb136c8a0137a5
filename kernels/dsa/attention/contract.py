"""What sparse attention demands of its inputs, and what a fusion that uses it must prove. No torch.

Which keys are selected is data on the device, so its range is not a guard: see ``selection``.

Legend: T queries, S keys, H query heads, G key heads, D and V widths of query and value, R rope width, K entries,
B keys of an entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardwright.kernels import guards
from shardwright.kernels.guards import VECTOR_BYTES, TensorLike
from shardwright.schemas.fusion import ObligationName

NAME = "dsa_attention"
DTYPES = ("bfloat16", "float16", "float32")
INDEX_DTYPES = ("int32",)
GATES = ("", "head", "value")
BLOCK_SIZES = (1, 8, 16, 32, 64)
MAX_HEADS = 128
MAX_WIDTH = 512
MAX_ROPE = 128
MAX_SELECTED = 16_384
"""Keys of one query, K · B: their positions are one program's tile."""
MAX_ADDRESS = (1 << 31) - 1
"""Elements of the keys, and of their fp32 gradient: addresses of gathered rows are 32-bit on the fast path."""

ROLES = {
    "q_nope": "activation [T, H, V], absorbed",
    "q_rope": "activation [T, H, R], rotated; optional, with k_rope",
    "latent": "activation [S, V], key and value",
    "k_rope": "activation [S, R], rotated; optional, with q_rope",
    "indices": "int32 [T, K], -1 for nothing",
    "gate": "activation [T, H, V] or [T, H], optional",
    "sinks": "parameter [H], optional",
    "o": "activation [T, H, V]",
    "lse": "fp32 [T, H], no gradient",
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
"""Each must be ``proved`` before this operator replaces masked attention: nobody else reads scores or shares, no
dropout, the selection comes from the indexer, projections (and LoRA on them) lie outside the region."""


def check_static(
    q: Mapping[str, TensorLike],
    k: Mapping[str, TensorLike],
    indices: TensorLike,
    gate: TensorLike | None,
    sinks: TensorLike | None,
    bounds: TensorLike | None,
    *,
    scale: float,
    block_size: int,
) -> None:
    """What can be refused from shapes and dtypes alone (fake tensors too).

    Args:
        q: query parts by name, each ``[T, H, width]``; the first carries the value's width in the latent form.
        k: key parts by name in the same order, then the value where it is a tensor of its own; ``[S, G, width]``.
        indices: ``[T, G, K]``.

    Raises:
        KernelError: ``rope-unpaired``, ``dtype-mixed``, ``dtype-unsupported``, ``wrong-shape``,
            ``heads-unsupported``, ``width-unsupported``, ``block-size-unsupported``, ``too-many-selected``,
            ``too-many-keys`` or ``bad-scale``.
    """
    named = {**q, **k}
    if ("q_rope" in q) != ("k_rope" in k):
        what = f"one rotated part without the other: {', '.join(named)}"
        raise guards.refuse(NAME, "rope-unpaired", what, "pass q_rope and k_rope, or neither")
    gated = {} if gate is None else {"gate": gate}
    guards.one_dtype(NAME, {**named, **gated}, DTYPES)
    guards.one_dtype(NAME, {"indices": indices}, INDEX_DTYPES)
    shapes = ", ".join(f"{role} {list(tensor.shape)}" for role, tensor in {**named, "indices": indices}.items())
    queries, keys = list(q.values()), list(k.values())
    if any(len(tensor.shape) != 3 for tensor in (*named.values(), indices)):
        raise guards.refuse(NAME, "wrong-shape", shapes, "pass [T, H, width], [S, G, width] and [T, G, K]")
    T, H, (S, G) = queries[0].shape[0], queries[0].shape[1], keys[0].shape[:2]
    alike = all(tuple(t.shape[:2]) == (T, H) for t in queries) and all(tuple(t.shape[:2]) == (S, G) for t in keys)
    widths = all(a.shape[2] == b.shape[2] and a.shape[2] > 0 for a, b in zip(queries, keys, strict=False))
    if not (alike and widths) or tuple(indices.shape[:2]) != (T, G):
        how = (
            "pass one token count, one key count, equal widths above 0; no rotated part (None) where nothing is rotated"
        )
        raise guards.refuse(NAME, "wrong-shape", shapes, how)
    if G < 1 or H < 1 or H % G or H // G > MAX_HEADS:
        what = f"{H} query heads on {G} key heads"
        raise guards.refuse(NAME, "heads-unsupported", what, f"a key head serves 1 to {MAX_HEADS} query heads, evenly")
    _check_widths(named)
    _check_selection(indices, keys, S, G, block_size)
    _check_small(T, H, keys[0 if len(keys) == len(queries) else -1].shape[2], gate, sinks, bounds)
    if not (math.isfinite(scale) and scale > 0):
        raise guards.refuse(NAME, "bad-scale", f"scale is {scale!r}", "pass a finite number above 0")


def _check_widths(named: Mapping[str, TensorLike]) -> None:
    for role, tensor in named.items():
        width = tensor.shape[2]
        values = VECTOR_BYTES // guards.BYTES[guards.dtype_name(tensor)]
        most = MAX_ROPE if role.endswith("rope") else MAX_WIDTH
        if width > most or width % values:
            what = f"{role} is {width} wide"
            raise guards.refuse(NAME, "width-unsupported", what, f"multiples of {values} up to {most}")


def _check_selection(indices: TensorLike, keys: list[TensorLike], S: int, G: int, block_size: int) -> None:
    if block_size not in BLOCK_SIZES:
        what = f"block_size is {block_size!r}"
        raise guards.refuse(NAME, "block-size-unsupported", what, f"use one of {BLOCK_SIZES}")
    K = indices.shape[2]
    if K * block_size > MAX_SELECTED:
        what = f"{K} entries of {block_size} keys"
        raise guards.refuse(NAME, "too-many-selected", what, f"select at most {MAX_SELECTED} keys for a query")
    if S * G * sum(tensor.shape[2] for tensor in keys) > MAX_ADDRESS:
        raise guards.refuse(NAME, "too-many-keys", f"{S} keys of {G} heads", "split the sequence")


def _check_small(
    T: int, H: int, V: int, gate: TensorLike | None, sinks: TensorLike | None, bounds: TensorLike | None
) -> None:
    if gate is not None and tuple(gate.shape) not in ((T, H, V), (T, H)):
        what = f"gate is {list(gate.shape)}"
        raise guards.refuse(NAME, "wrong-shape", what, f"pass [{T}, {H}, {V}] or [{T}, {H}]")
    if sinks is not None:
        guards.one_dtype(NAME, {"sinks": sinks}, DTYPES)
        if tuple(sinks.shape) != (H,):
            raise guards.refuse(NAME, "wrong-shape", f"sinks are {list(sinks.shape)}", f"pass one a head [{H}]")
    if bounds is not None:
        guards.one_dtype(NAME, {"bounds": bounds}, INDEX_DTYPES)
        if tuple(bounds.shape) != (T, 2):
            raise guards.refuse(NAME, "wrong-shape", f"bounds are {list(bounds.shape)}", f"pass [{T}, 2]")


def check_places(strided: Mapping[str, TensorLike], compact: Mapping[str, TensorLike], *, interpreted: bool) -> None:
    """Guards that need real tensors: one device; queries and keys may be views whose rows are dense and aligned.

    Args:
        strided: tensors whose last dim must be dense, with all rows on 16-byte boundaries.
        compact: tensors that must be dense.

    Raises:
        KernelError: ``device-mixed``, ``device-unsupported``, ``not-contiguous`` or ``misaligned``.
    """
    guards.one_device(NAME, {**strided, **compact}, interpreted=interpreted)
    guards.dense(NAME, compact)
    for role, tensor in strided.items():
        strides: tuple[int, ...] = tensor.stride()  # type: ignore[attr-defined]
        values = VECTOR_BYTES // guards.BYTES[guards.dtype_name(tensor)]
        if strides[-1] != 1 and tensor.shape[-1] > 1:
            raise guards.refuse(NAME, "not-contiguous", f"{role}'s rows have gaps", f"pass {role}.contiguous()")
        rows_apart = [s for s, n in zip(strides[:-1], tensor.shape[:-1], strict=True) if n > 1]
        if tensor.data_ptr() % VECTOR_BYTES or any(s % values for s in rows_apart):
            raise guards.refuse(NAME, "misaligned", f"{role} has rows off 16-byte boundaries", f"pass {role}.clone()")
