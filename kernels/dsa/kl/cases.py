"""How the indexer's loss is verified, timed and compiled: the sparse stage, and the dense warm-up.

Legend: T queries and keys, N indexer heads, D indexer width, H attention heads, M attention width, k chosen keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwright.kernels.cases import BadInput, BenchCase, OpSuite, Shape
from shardwright.kernels.compile_gate import AnyCase
from shardwright.kernels.dsa.indexer import alarms
from shardwright.kernels.dsa.indexer.cases import draw, score_inputs
from shardwright.kernels.dsa.indexer.op import default_scale, dsa_indexer
from shardwright.kernels.dsa.kl import op
from shardwright.kernels.dsa.kl.cost import cost
from shardwright.kernels.dsa.kl.reference import attention_lse, dsa_kl_reference
from shardwright.kernels.launched import cases_of, meta

LARGE = {"T": 8192, "N": 64, "D": 128, "K": 2048, "H": 64, "M": 576}
SMALL: tuple[Shape, ...] = (
    {"T": 12, "N": 4, "D": 16, "K": 8, "H": 4, "M": 48},
    {"T": 0, "N": 4, "D": 16, "K": 8, "H": 4, "M": 16},
    {"T": 9, "N": 3, "D": 16, "K": 5, "H": 6, "M": 16},
)
DEVICE: tuple[Shape, ...] = (
    {"T": 700, "N": 64, "D": 128, "K": 256, "H": 64, "M": 576},
    {"T": 401, "N": 32, "D": 128, "K": 65, "H": 128, "M": 576},
)
EAGER_ROWS = 128
OWN_CHOICE = 4096
"""From this T on the operator chooses the keys of a case; below, plain torch."""


def attention_scale(M: int) -> float:
    """Softmax scale of a case's attention."""
    return float(M**-0.5)


def sparse_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """The indexer's q, k, weights; the attention's q, k, log-sum-exp; indices."""
    T, H, M = shape["T"], shape["H"], shape["M"]
    if T < OWN_CHOICE:
        q, k, weights, indices = score_inputs(shape, dtype, device, seed)
    else:
        q, k, weights = (
            draw(size, dtype, device, seed + at)
            for at, size in enumerate(((T, shape["N"], shape["D"]), (T, shape["D"]), (T, shape["N"])))
        )
        indices = dsa_indexer(q, k, weights, top_k=shape["K"])
    q_main, k_main = draw((T, H, M), dtype, device, seed + 5), draw((T, 1, M), dtype, device, seed + 6)
    return q, k, weights, q_main, k_main, attention_lse(q_main, k_main, indices, attention_scale(M)), indices


def dense_inputs(shape: Shape, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, ...]:
    """As ``sparse_inputs`` without indices."""
    T, N, D, H, M = (shape[name] for name in ("T", "N", "D", "H", "M"))
    sizes = ((T, N, D), (T, D), (T, N), (T, H, M), (T, 1, M))
    made = tuple(draw(size, dtype, device, seed + at) for at, size in enumerate(sizes))
    return *made, attention_lse(made[3], made[4], None, attention_scale(M))


def fused(q: Tensor, k: Tensor, weights: Tensor, q_main: Tensor, k_main: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """The operator; of an odd number of queries with dk in a fixed order."""
    settings = {"attention_scale": attention_scale(q_main.shape[2]), "deterministic": q.shape[0] % 2 == 1}
    return (op.dsa_kl(q, k, weights, q_main, k_main, *rest, **settings),)  # type: ignore[arg-type]


def reference(
    q: Tensor, k: Tensor, weights: Tensor, q_main: Tensor, k_main: Tensor, *rest: Tensor
) -> tuple[Tensor, ...]:
    scales = {"scale": default_scale(q), "attention_scale": attention_scale(q_main.shape[2])}
    return (dsa_kl_reference(q, k, weights, q_main, k_main, *rest, **scales),)  # type: ignore[arg-type]


def eager(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    q_main: Tensor,
    k_main: Tensor,
    lse: Tensor,
    indices: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Torch operations, some queries at a time. Keys are gathered by index_select, whose backward is index_add."""
    T, _, M = q_main.shape
    scale, total = default_scale(q), q.new_zeros((), dtype=torch.float32)
    positions = torch.arange(T, device=q.device)
    for first in range(0, T, EAGER_ROWS):
        piece = slice(first, min(first + EAGER_ROWS, T))
        rows = piece.stop - first
        if indices is None:
            seen = positions[None] <= positions[piece, None]
            dots = torch.einsum("tnd,sd->tns", q[piece], k)
            logits = torch.einsum("thm,sm->ths", q_main[piece], k_main[:, 0])
        else:
            seen, flat = indices[piece] >= 0, indices[piece].clamp_min(0).reshape(-1)
            dots = torch.einsum("tnd,tjd->tnj", q[piece], k.index_select(0, flat).view(rows, -1, k.shape[1]))
            main = k_main[:, 0].index_select(0, flat).view(rows, -1, M)
            logits = torch.einsum("thm,tjm->thj", q_main[piece], main)
        mass = (logits.float() * attention_scale(M) - lse[piece, :, None]).exp().sum(1).masked_fill(~seen, 0.0)
        target = mass / mass.sum(-1, keepdim=True)
        scores = torch.einsum("tnj,tn->tj", dots.relu(), weights[piece]).float() * scale
        share = scores.masked_fill(~seen, float("-inf")).log_softmax(-1).masked_fill(~seen, 0.0)
        total = total + (torch.xlogy(target, target) - target * share).sum()
    return (total / max(1, T),)


def compile_cases() -> tuple[AnyCase, ...]:
    """Every launch at the benchmark's size in bf16, both stages, and 128 heads."""

    def call(stage: str, H: int) -> Callable[[], Tensor]:
        T, N, D, K, M = (LARGE[name] for name in ("T", "N", "D", "K", "M"))
        q, k, weights = meta((T, N, D), learns=True), meta((T, D), learns=True), meta((T, N), learns=True)
        indices = None if stage == "dense" else meta((T, K), torch.int32)
        rest = (meta((T, H, M)), meta((T, 1, M)), meta((T, H), torch.float32), indices)
        return lambda: op.dsa_kl(q, k, weights, *rest, attention_scale=0.1, deterministic=stage == "fixed-order")

    found = [case for stage in ("sparse", "fixed-order", "dense") for case in cases_of(f"kl/{stage}", call(stage, 64))]
    found += cases_of("kl/128", call("sparse", 128))
    return tuple(case for at, case in enumerate(found) if not any(case.same_as(other) for other in found[:at]))


def bad_inputs(device: str) -> tuple[BadInput, ...]:
    sizes = ((4, 2, 16), (4, 16), (4, 2), (4, 4, 32), (4, 1, 32), (4, 4))
    q, k, weights, q_main, k_main = (torch.ones(s, dtype=torch.bfloat16, device=device) for s in sizes[:-1])
    lse = torch.ones(sizes[-1], device=device)
    indices = torch.zeros((4, 1), dtype=torch.int32, device=device)

    def run(index: Tensor | None = indices, main: Tensor = q_main, keys: Tensor = k_main, **options: object) -> None:
        settings = {"attention_scale": 1.0, **options}
        op.dsa_kl(q, k, weights, main, keys, lse, index, **settings)  # type: ignore[arg-type]
        alarms.raise_pending(wait=True)

    three = k_main.repeat(1, 3, 1)
    odd = q_main[..., :28].contiguous()
    bounds = torch.tensor([0, 3, 2, 4])
    return (
        BadInput("key-heads-that-do-not-divide", "bad-head-count", lambda: run(keys=three)),
        BadInput("a-width-of-three-powers", "bad-head-dim", lambda: run(main=odd, keys=odd[:, :1].contiguous())),
        BadInput("widths-differ", "wrong-shape", lambda: run(keys=k_main[..., :16])),
        BadInput("target-learns", "main-learns", lambda: run(main=q_main.clone().requires_grad_())),
        BadInput("scale-is-nan", "bad-scale", lambda: run(attention_scale=float("nan"))),
        BadInput("scale-of-the-indexer-is-zero", "bad-scale", lambda: run(scale=0.0)),
        BadInput("unknown-reduction", "bad-reduction", lambda: run(reduction="none")),
        BadInput("unsorted-bounds", "bad-cu-seqlens", lambda: run(None, cu_seqlens=bounds)),
        BadInput("index-past-the-keys", "index-out-of-range", lambda: run(indices + 4)),
        BadInput("nan-in-the-attention", "nan-scores", lambda: run(main=q_main * float("nan"))),
    )


INPUTS = ("q", "k", "weights", "q_main", "k_main", "lse")
CONSTANT = ("q_main", "k_main", "lse")


def _suite(sparse: bool) -> OpSuite:
    def shapes(chosen: tuple[Shape, ...]) -> tuple[Shape, ...]:
        return chosen if sparse else tuple({**shape, "K": 0} for shape in chosen)

    (large,) = shapes((LARGE,))
    return OpSuite(
        op="dsa_kl",
        inputs=sparse_inputs if sparse else dense_inputs,
        input_names=(*INPUTS, "indices") if sparse else INPUTS,
        output_names=("loss",),
        frozen=(),
        fused=fused,
        reference=reference,
        cost=cost,
        rivals={"eager": lambda: eager},
        small_shapes=shapes(SMALL),
        large_shapes=shapes(DEVICE),
        bench=(BenchCase("dsa-kl/T8k" if sparse else "dsa-kl-dense/T8k", large, torch.bfloat16, ("fwd+bwd",)),),
        compile_cases=compile_cases if sparse else (),
        dtypes=(torch.bfloat16, torch.float16),
        constant=(*CONSTANT, "indices") if sparse else CONSTANT,
        bad_inputs=bad_inputs if sparse else None,
    )


SUITE, DENSE_SUITE = _suite(True), _suite(False)
