"""How permute and combine are verified, timed and compiled.

A routing is fixed by the sizes (T, K, E): it is data of a case, drawn once. What is timed is all that a MoE
layer does around its experts: metadata from ids, rows by expert, weighted sums back to tokens.

Legend: T tokens, K experts a token, E experts, R = T·K rows, H hidden.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from shardwright.kernels.cases import BadInput, BenchCase, OpSuite, Shape, normal, normal_on_device, row_facts
from shardwright.kernels.compile_gate import AnyCase
from shardwright.kernels.launched import cases_of, meta
from shardwright.kernels.permute.cost import cost
from shardwright.kernels.permute.op import combine, gather_rows, route
from shardwright.kernels.permute.reference import combine_reference, gather_rows_reference, route_reference
from shardwright.kernels.permute.tuning import tune_cases

SMALL: dict[tuple[int, int, int], str] = {
    (40, 3, 5): "skewed",
    (97, 2, 4): "hot",
    (33, 4, 9): "empty",
    (21, 3, 6): "sentinels",
    (19, 16, 896): "uniform",
    (0, 2, 3): "uniform",
}
"""Distributions of the small routings: heavy tail, all tokens on one expert, experts without tokens, -1 slots."""


@cache
def routing(T: int, K: int, E: int, device: str) -> Tensor:
    """``ids [T, K]``: K different experts a token (but for ``sentinels``), by seeded scores."""
    kind = SMALL.get((T, K, E), "uniform")
    generator = torch.Generator().manual_seed(11)
    scores = torch.randn((T, E), generator=generator)
    if kind == "skewed":
        scores += 2 * torch.randn(E, generator=generator)
    if kind == "hot":
        scores[:, 1] += 100
    if kind == "empty":
        scores[:, ::3] -= 100
    ids = scores.topk(K, dim=-1).indices
    if kind == "sentinels":
        ids[torch.rand((T, K), generator=generator) < 0.4] = -1
        ids[0] = E + 7
    return ids.to(device)


@cache
def experts_of(T: int, K: int) -> int:
    """Experts of the case with T tokens and K slots: tensors alone do not say."""
    shapes = (*SMALL, *((at["T"], at["K"], at["E"]) for at in (*LARGE, *SIZES.values())))
    return next(e for t, k, e in shapes if (t, k) == (T, K))


LARGE: tuple[Shape, ...] = ({"T": 4099, "K": 8, "E": 130, "H": 2048},)
SIZES: dict[str, Shape] = {
    "128e8": {"T": 8192, "K": 8, "E": 128, "H": 2048},
    "896e16": {"T": 8192, "K": 16, "E": 896, "H": 3584},
}


def inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """Tokens x [T, H], expert outputs y [R, H], routing weights [T, K]."""
    T, K, H = shape["T"], shape["K"], shape["H"]
    draw = normal_on_device if T * K * H > 1 << 22 else normal
    return tuple(
        draw(size, dtype, device, seed + at).mul_(scale)
        for at, (size, scale) in enumerate((((T, H), 1.0), ((T * K, H), 1.0), ((T, K), 0.5)))
    )


def fused(x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    T, K = weights.shape
    E = experts_of(T, K)
    at = route(routing(T, K, E, str(x.device)), E)
    return gather_rows(x, at), combine(y, at, weights), at.counts


def reference(x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    T, K = weights.shape
    E = experts_of(T, K)
    counts, _, place = route_reference(routing(T, K, E, str(x.device)), E)
    return gather_rows_reference(x, place, T * K), combine_reference(y, place, weights), counts.to(torch.int32)


def sorted_gather(x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """What model code does: stable sort, index, weighted index_add."""
    T, K = weights.shape
    E = experts_of(T, K)
    flat = routing(T, K, E, str(x.device)).flatten()
    order = flat.argsort(stable=True)
    token = order // K
    rows = y * weights.flatten()[order][:, None].to(y.dtype)
    return x[token], torch.zeros_like(x).index_add(0, token, rows), torch.bincount(flat, minlength=E)


def facts(case: BenchCase) -> dict[str, float]:
    """The distribution of rows over experts."""
    T, K, E = (case.shape[name] for name in ("T", "K", "E"))
    return row_facts(torch.bincount(routing(T, K, E, "cuda").flatten(), minlength=E))


def launched(T: int, K: int, E: int, H: int) -> tuple[AnyCase, ...]:
    """Every launch of the operators and their gradients at one size."""

    def call() -> tuple[Tensor, ...]:
        at = route(meta((T, K), torch.int64), E)
        return gather_rows(meta((T, H), learns=True), at), combine(
            meta((T * K, H), learns=True), at, meta((T, K), torch.float32, learns=True)
        )

    return cases_of(f"permute/{E}e{K}", call)


def compile_cases() -> tuple[AnyCase, ...]:
    return tuple(case for size in SIZES.values() for case in launched(*(size[n] for n in ("T", "K", "E", "H"))))


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    ids, rows = torch.zeros((4, 2), dtype=torch.int64, device=device), torch.ones((8, 16), device=device)
    weights = torch.ones((4, 2), device=device)
    at = route(ids, 3)
    return (
        BadInput("ids-of-floats", "dtype-unsupported", lambda: route(ids.float(), 3)),
        BadInput("ids-of-one-dim", "wrong-shape", lambda: route(ids[:, 0], 3)),
        BadInput("too-many-slots", "wrong-shape", lambda: route(ids.repeat(1, 40), 3)),
        BadInput("no-experts", "too-many-experts", lambda: route(ids, 0)),
        BadInput("ids-with-gaps", "not-contiguous", lambda: route(ids.repeat(1, 2)[:, ::2], 3)),
        BadInput("weights-of-another-shape", "wrong-shape", lambda: combine(rows, at, weights[:3])),
        BadInput("rows-of-integers", "dtype-unsupported", lambda: combine(rows.long(), at, weights)),
    )


SUITE = OpSuite(
    op="permute",
    inputs=inputs,
    input_names=("x", "y", "weights"),
    output_names=("rows", "out", "counts"),
    frozen=("weights",),
    fused=fused,
    reference=reference,
    cost=cost,
    rivals={"sort": lambda: sorted_gather},
    small_shapes=tuple({"T": T, "K": K, "E": E, "H": 40} for T, K, E in SMALL),
    large_shapes=LARGE,
    bench=tuple(BenchCase(f"permute/{k}", v, torch.bfloat16, ("fwd", "fwd+bwd")) for k, v in SIZES.items()),
    compile_cases=compile_cases,
    facts=facts,
    tune=tune_cases,
    bad_inputs=bad_inputs,
)
