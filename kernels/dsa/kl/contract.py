"""What the indexer's loss demands of its inputs, and what a fusion that uses it must prove. No torch.

NaN policy: a NaN in a query's scores or attention makes the loss NaN and, from that query, its gradients; the
typed error ``nan-scores`` follows (see ``indexer.alarms``).

Legend: T queries, S keys, N indexer heads, D indexer width, H attention heads, G key heads, M attention width,
k chosen keys.
"""

from __future__ import annotations

import math

from shardwright.kernels import guards
from shardwright.kernels.dsa.indexer import contract as indexer
from shardwright.kernels.guards import TensorLike
from shardwright.schemas.fusion import ObligationName

NAME = "dsa_kl"
REDUCTIONS = ("mean", "sum")
LEAST_PIECE = 16

ROLES = {
    "q": "indexer's activation [T, N, D]",
    "k": "indexer's activation [S, D]",
    "weights": "indexer's activation [T, N]",
    "q_main": "attention's queries [T, H, M], no gradient",
    "k_main": "attention's keys [S, G, M], no gradient",
    "lse": "log-sum-exp of the attention [T, H] fp32, no gradient",
    "indices": "chosen keys [T, k] int32; none in the dense warm-up",
    "loss": "fp32 scalar",
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
"""Each must be ``proved`` before this operator replaces an indexer's loss; all attention heads are local: a head
sum over ranks would come between target and loss."""


def pieces(M: int) -> tuple[int, int]:
    """Width M as one or two powers of two, the second 0 where one is enough: 576 is 512 + 64.

    Raises:
        KernelError: ``bad-head-dim``.
    """
    a = 1 << (max(1, M).bit_length() - 1)
    b = M - a
    if M < LEAST_PIECE or (b and (b < LEAST_PIECE or b & (b - 1))):
        what = f"M is {M}"
        raise guards.refuse(NAME, "bad-head-dim", what, "use a sum of one or two powers of two, each at least 16")
    return a, b


def check_static(
    q: TensorLike,
    k: TensorLike,
    weights: TensorLike,
    q_main: TensorLike,
    k_main: TensorLike,
    lse: TensorLike,
    indices: TensorLike | None,
    *,
    attention_scale: float,
    query_start: int,
    reduction: str,
    main_learns: bool = False,
) -> None:
    """What can be refused from shapes, dtypes and flags alone (fake tensors too).

    Raises:
        KernelError: what the indexer's contract raises; ``bad-head-count``, ``bad-head-dim``, ``bad-scale``,
            ``bad-reduction`` or ``main-learns``.
    """
    indexer.check_scored(q, k, weights, NAME)
    indexer.check_place(q, k, query_start, NAME)
    if indices is not None:
        indexer.check_selection(q, indices, NAME)
    guards.one_dtype(NAME, {"q": q, "q_main": q_main, "k_main": k_main}, indexer.DTYPES)
    guards.one_dtype(NAME, {"lse": lse}, ("float32",))
    shapes = [tuple(tensor.shape) for tensor in (q_main, k_main, lse)]
    T, S = q.shape[0], k.shape[0]
    fits = [len(s) for s in shapes] == [3, 3, 2] and (shapes[0][0], shapes[1][0]) == (T, S)
    if not fits or shapes[0][2] != shapes[1][2] or shapes[2] != shapes[0][:2]:
        what = f"q_main is {list(shapes[0])}, k_main is {list(shapes[1])}, lse is {list(shapes[2])}"
        raise guards.refuse(NAME, "wrong-shape", what, "pass q_main [T, H, M], k_main [S, G, M] and lse [T, H]")
    H, G = shapes[0][1], shapes[1][1]
    if G < 1 or H < 1 or H % G:
        raise guards.refuse(NAME, "bad-head-count", f"{H} heads over {G} key heads", "let key heads divide heads")
    pieces(shapes[0][2])
    if not math.isfinite(attention_scale):
        what = f"attention_scale is {attention_scale!r}"
        raise guards.refuse(NAME, "bad-scale", what, "pass the attention's own softmax scale")
    if reduction not in REDUCTIONS:
        raise guards.refuse(NAME, "bad-reduction", f"reduction is {reduction!r}", f"use one of {', '.join(REDUCTIONS)}")
    if main_learns:
        what = "q_main, k_main or lse requires a gradient; the target has none"
        raise guards.refuse(NAME, "main-learns", what, "pass them detached: the indexer learns from the attention only")
