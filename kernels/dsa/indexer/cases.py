"""How the lightning indexer is verified, timed and compiled.

The sizes of an input name its top-k. A choice is compared as the set of keys of each query: a key that differs by
one fp32 rounding would else shift a whole ascending row.

Legend: T queries and keys, N indexer heads, D head width, k chosen keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.kernels.cases import BadInput, BenchCase, OpSuite, Shape, normal, normal_on_device
from shardwright.kernels.compile_gate import AnyCase
from shardwright.kernels.dsa.indexer import alarms, op, rivals
from shardwright.kernels.dsa.indexer.cost import cost
from shardwright.kernels.dsa.indexer.reference import (
    scores_at_reference,
    scores_reference,
    select_reference,
    visible,
)
from shardwright.kernels.launched import cases_of, meta, noted

LARGE = {"N": 64, "D": 128, "K": 2048}
SMALL: tuple[Shape, ...] = (
    {"T": 12, "N": 5, "D": 32, "K": 5},
    {"T": 8, "N": 64, "D": 16, "K": 4},
    {"T": 0, "N": 4, "D": 16, "K": 8},
    {"T": 9, "N": 2, "D": 16, "K": 1},
)
DEVICE: tuple[Shape, ...] = (
    {"T": 2600, "N": 64, "D": 128, "K": 2048},
    {"T": 3001, "N": 32, "D": 128, "K": 65},
    {"T": 1111, "N": 16, "D": 64, "K": 63},
)
BENCH = tuple((f"T{T // 1024}k", {"T": T, **LARGE}) for T in (8192, 16_384, 32_768))
CHOSEN = {(s["T"], s["N"], s["D"]): s["K"] for s in (*SMALL, *DEVICE, *(shape for _, shape in BENCH))}
"""(T, N, D) → top-k of the cases with those sizes."""

COMPARED = 4096
"""Longest T whose choice is given as a set ``[T, T]``; beyond, as the operator gives it."""

LARGE_VALUES = 1 << 24


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Normal values; large ones are drawn on the device."""
    count = 1
    for n in shape:
        count *= n
    return (normal_on_device if count > LARGE_VALUES else normal)(shape, dtype, device, seed)


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    T, N, D = shape["T"], shape["N"], shape["D"]
    sizes = ((T, N, D), (T, D), (T, N))
    return tuple(draw(size, dtype, device, seed + at) for at, size in enumerate(sizes))


def top_k(q: Tensor) -> int:
    """A case's k: its sizes name it."""
    T, N, D = q.shape
    return CHOSEN[T, N, D]


def members(indices: Tensor, S: int) -> Tensor:
    """Indices as sets: ``[T, S]`` int32, 1 where a key is chosen."""
    found = torch.zeros((indices.shape[0], S + 1), dtype=torch.int32, device=indices.device)
    found.scatter_(1, torch.where(indices < 0, S, indices).long(), 1)
    return found[:, :S]


def fused(q: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    indices = op.dsa_indexer(q, k, weights, top_k=top_k(q))
    return (members(indices, k.shape[0]) if q.shape[0] <= COMPARED else indices,)


def reference(q: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    T, S = q.shape[0], k.shape[0]
    scores = scores_reference(q, k, weights, op.default_scale(q))
    return (members(select_reference(scores, visible(T, S, 0, None, q.device), top_k(q)), S),)


def eager(q: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    return (rivals.eager(q, k, weights, top_k(q)),)


def score_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """q, k, weights, and indices that plain torch chose."""
    q, k, weights = inputs(shape, dtype, device, seed)
    T, S = q.shape[0], k.shape[0]
    scores = scores_reference(q.float(), k.float(), weights.float(), 1.0)
    return q, k, weights, select_reference(scores, visible(T, S, 0, None, q.device), shape["K"])


def fused_scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    """Scores at chosen keys; of an odd number of queries with dk in a fixed order."""
    return (op.indexer_scores(q, k, weights, indices, deterministic=q.shape[0] % 2 == 1),)


def reference_scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    return (scores_at_reference(q, k, weights, indices, op.default_scale(q)),)


NARROW = {
    "indexer_rope_kernel": "pairs of neighbours, and halves of rows",
}


def compile_cases() -> tuple[AnyCase, ...]:
    """Every launch of the shipped sizes in bf16: rows of each length, GLM-5's heads, packed, rotated, fp8, LIG."""

    def choice(T: int, N: int, **options: object) -> tuple[AnyCase, ...]:
        q, k, weights = meta((T, N, 128)), meta((T, 128)), meta((T, N))
        label = "/".join(["indexer", f"T{T}N{N}", *(str(value) for value in options if value != "cos")])
        return cases_of(label, lambda: op.dsa_indexer(q, k, weights, top_k=2048, **options))  # type: ignore[arg-type]

    def scores(deterministic: bool) -> Tensor:
        q, k, weights = (
            meta((8192, 64, 128), learns=True),
            meta((8192, 128), learns=True),
            meta((8192, 64), learns=True),
        )
        indices = meta((8192, 2048), torch.int32)
        return op.indexer_scores(q, k, weights, indices, deterministic=deterministic)

    table = meta((8192, 32), torch.float32)
    found = [*choice(8192, 64), *choice(32_768, 64), *choice(65_536, 64), *choice(8192, 32)]
    found += choice(8192, 64, cu_seqlens=torch.tensor([0, 5000, 8192]))
    found += choice(8192, 64, precision="fp8")
    for layout in ("half-split", "interleaved"):
        found += choice(8192, 64, cos=table, sin=table, layout=layout)
    for deterministic in (False, True):
        kind = "fixed-order" if deterministic else "atomics"
        found += cases_of(f"indexer/scores/{kind}", lambda d=deterministic: scores(d))  # type: ignore[misc]
    distinct: list[AnyCase] = []
    for case in noted(found, narrow=NARROW):  # type: ignore[arg-type]
        if not any(case.same_as(other) for other in distinct):  # type: ignore[arg-type]
            distinct.append(case)
    return tuple(distinct)


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    kind = torch.bfloat16
    q, k, weights = (torch.ones(size, dtype=kind, device=device) for size in ((4, 2, 16), (4, 16), (4, 2)))
    run = op.dsa_indexer
    table = torch.ones((4, 8), device=device)
    indices = torch.zeros((4, 3), dtype=torch.int32, device=device)

    def lengths(*bounds: int) -> Tensor:
        return torch.tensor(bounds)

    def on_device(*bounds: int) -> None:
        run(q, k, weights, top_k=2, cu_seqlens=lengths(*bounds).to(device))
        alarms.raise_pending(wait=True)

    def not_a_number() -> None:
        run(q * float("nan"), k, weights, top_k=2)
        alarms.raise_pending(wait=True)

    def outside(index: int) -> None:
        op.indexer_scores(q, k, weights, indices + index)
        alarms.raise_pending(wait=True)

    return (
        BadInput("no-keys-asked-for", "bad-top-k", lambda: run(q, k, weights, top_k=0)),
        BadInput("too-many-keys-asked-for", "bad-top-k", lambda: run(q, k, weights, top_k=2049)),
        BadInput("heads-differ", "bad-head-count", lambda: run(q, k, weights[:, :1].contiguous(), top_k=2)),
        BadInput(
            "too-many-heads", "bad-head-count", lambda: run(q.repeat(1, 33, 1), k, weights.repeat(1, 33), top_k=2)
        ),
        BadInput("odd-width", "bad-head-dim", lambda: run(q[..., :12], k[..., :12], weights, top_k=2)),
        BadInput("widths-differ", "wrong-shape", lambda: run(q, k.repeat(1, 2), weights, top_k=2)),
        BadInput("a-query-without-its-key", "bad-query-start", lambda: run(q, k, weights, top_k=2, query_start=1)),
        BadInput("scale-turns-the-order", "bad-scale", lambda: run(q, k, weights, top_k=2, scale=-1.0)),
        BadInput("unknown-precision", "bad-precision", lambda: run(q, k, weights, top_k=2, precision="int4")),
        BadInput("one-table", "bad-rope", lambda: run(q, k, weights, top_k=2, cos=table)),
        BadInput(
            "unknown-layout", "bad-rope", lambda: run(q, k, weights, top_k=2, cos=table, sin=table, layout="neox")
        ),
        BadInput(
            "unsorted-bounds", "bad-cu-seqlens", lambda: run(q, k, weights, top_k=2, cu_seqlens=lengths(0, 3, 1, 4))
        ),
        BadInput(
            "bounds-that-end-early", "bad-cu-seqlens", lambda: run(q, k, weights, top_k=2, cu_seqlens=lengths(0, 3))
        ),
        BadInput("unsorted-bounds-on-device", "bad-cu-seqlens", lambda: on_device(0, 3, 1, 4)),
        BadInput("nan-scores", "nan-scores", not_a_number),
        BadInput("index-past-the-keys", "index-out-of-range", lambda: outside(4)),
        BadInput("index-below-minus-one", "index-out-of-range", lambda: outside(-2)),
        BadInput("indices-of-other-queries", "wrong-shape", lambda: op.indexer_scores(q, k, weights, indices[:3])),
    )


SUITE = OpSuite(
    op="dsa_indexer",
    inputs=inputs,
    input_names=("q", "k", "weights"),
    output_names=("chosen",),
    frozen=(),
    fused=fused,
    reference=reference,
    cost=cost,
    rivals={"eager": lambda: eager},
    small_shapes=SMALL,
    large_shapes=DEVICE,
    bench=tuple(BenchCase(f"dsa-indexer/{name}", shape, torch.bfloat16, ("fwd",)) for name, shape in BENCH),
    compile_cases=compile_cases,
    dtypes=(torch.bfloat16, torch.float16),
    constant=("q", "k", "weights"),
    index_slack=8,
    bad_inputs=bad_inputs,
)

SCORES_SUITE = OpSuite(
    op="dsa_indexer",
    inputs=score_inputs,
    input_names=("q", "k", "weights", "indices"),
    output_names=("scores",),
    frozen=(),
    fused=fused_scores,
    reference=reference_scores,
    cost=cost,
    rivals={},
    small_shapes=SMALL,
    dtypes=(torch.bfloat16, torch.float16),
    large_shapes=({"T": 600, "N": 64, "D": 128, "K": 320}, {"T": 1001, "N": 32, "D": 128, "K": 65}),
    constant=("indices",),
)
