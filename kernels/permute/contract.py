"""What permute and combine demand of their inputs. No torch.

Legend: T tokens, K experts a token, E experts, R rows, H hidden.
"""

from __future__ import annotations

from shardwright.kernels import guards
from shardwright.kernels.guards import TensorLike
from shardwright.kernels.permute.configs import MAX_EXPERTS, padded_rows
from shardwright.schemas.fusion import ObligationName

NAME = "permute"
DTYPES = ("bfloat16", "float16", "float32")
WEIGHT_DTYPES = ("bfloat16", "float16", "float32")
INDEX_DTYPES = ("int32", "int64")
MAX_SLOTS = 64
MAX_MULTIPLE = 4096
MAX_ENTRIES = 1 << 30
"""Row numbers are 32-bit; addresses are 64-bit."""

ROLES = {
    "ids": "expert of each token's slot [T, K]; outside 0 .. E-1: not routed",
    "weights": "weight of each slot [T, K]",
    "x": "activation [T, H]",
    "y": "expert outputs, rows sorted by expert [R, H]",
}

OBLIGATIONS: tuple[ObligationName, ...] = (
    "no-escaping-value",
    "no-mutation-or-alias",
    "no-randomness",
    "dtype-shape-stride-device",
    "sharding-boundary",
    "differential-test",
)


def check_ids(op: str, ids: TensorLike, experts: int, *, interpreted: bool) -> None:
    """``ids`` is a dense integer ``[T, K]`` with ``1 <= K <= 64`` and at most 2³⁰ entries.

    Raises:
        KernelError: ``dtype-unsupported``, ``wrong-shape``, ``too-many-experts``, ``too-many-rows``,
            ``device-unsupported`` or ``not-contiguous``.
    """
    guards.one_dtype(op, {"ids": ids}, INDEX_DTYPES)
    if len(ids.shape) != 2 or not 1 <= ids.shape[1] <= MAX_SLOTS:
        raise guards.refuse(op, "wrong-shape", f"ids is {list(ids.shape)}", f"pass [T, K], 1 <= K <= {MAX_SLOTS}")
    if not 1 <= experts <= MAX_EXPERTS:
        raise guards.refuse(op, "too-many-experts", f"{experts} experts", f"1 to {MAX_EXPERTS} experts are possible")
    if ids.shape[0] * ids.shape[1] > MAX_ENTRIES:
        raise guards.refuse(op, "too-many-rows", f"ids is {list(ids.shape)}", "split the batch")
    guards.one_device(op, {"ids": ids}, interpreted=interpreted)
    if not ids.is_contiguous():
        raise guards.refuse(op, "not-contiguous", "ids has gaps or a permuted layout", "pass ids.contiguous()")


def check_multiple(op: str, ids: TensorLike, experts: int, multiple: int) -> None:
    """Rows of an expert are padded to whole multiples, 1 to 4096, and still have 32-bit numbers.

    Raises:
        KernelError: ``bad-parameter`` or ``too-many-rows``.
    """
    if not isinstance(multiple, int) or isinstance(multiple, bool) or not 1 <= multiple <= MAX_MULTIPLE:
        raise guards.refuse(op, "bad-parameter", f"multiple is {multiple!r}", f"pass 1 to {MAX_MULTIPLE} rows")
    if padded_rows(ids.shape[0] * ids.shape[1], experts, multiple) > MAX_ENTRIES:
        what = f"ids is {list(ids.shape)}, {experts} experts padded to multiples of {multiple}"
        raise guards.refuse(op, "too-many-rows", what, "split the batch, or pad less")


def check_rows(op: str, name: str, rows: TensorLike, *, interpreted: bool) -> None:
    """``rows`` is a dense, aligned floating ``[R, H]`` with H >= 1.

    Raises:
        KernelError: ``dtype-unsupported``, ``wrong-shape``, ``device-unsupported``, ``not-contiguous`` or
            ``misaligned``.
    """
    guards.one_dtype(op, {name: rows}, DTYPES)
    if len(rows.shape) != 2 or rows.shape[1] < 1:
        raise guards.refuse(op, "wrong-shape", f"{name} is {list(rows.shape)}", "pass rows [R, H] with H >= 1")
    guards.one_device(op, {name: rows}, interpreted=interpreted)
    guards.dense(op, {name: rows})


def check_row_count(op: str, rows: TensorLike, expected: int) -> None:
    """One row for each that the routing numbers: fewer would be read past their end.

    Raises:
        KernelError: ``wrong-shape``.
    """
    if rows.shape[0] != expected:
        what = f"y has {rows.shape[0]} rows, the routing {expected}"
        raise guards.refuse(op, "wrong-shape", what, "pass the rows of this routing, padding included")


def check_weights(op: str, weights: TensorLike, shape: tuple[int, ...]) -> None:
    """``weights`` is dense, floating and ``[T, K]``.

    Raises:
        KernelError: ``dtype-unsupported``, ``wrong-shape`` or ``not-contiguous``.
    """
    guards.one_dtype(op, {"weights": weights}, WEIGHT_DTYPES)
    if tuple(weights.shape) != shape:
        raise guards.refuse(op, "wrong-shape", f"weights is {list(weights.shape)}, ids is {list(shape)}", "match them")
    if not weights.is_contiguous():
        raise guards.refuse(op, "not-contiguous", "weights has gaps", "pass weights.contiguous()")
