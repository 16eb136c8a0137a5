"""Counted work of the lightning indexer. No torch, no device, no milliseconds.

Legend: T queries and keys, N indexer heads, D head width, k chosen keys, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.dsa.indexer.configs import QUERIES, SCORE, chunks
from shardwright.kernels.guards import BYTES
from shardwright.schemas.ops import OpCost, PassCost

SCORE_BYTES = INDEX_BYTES = FLAG_BYTES = 4
COUNTS = 7
"""Times that a row of scores is compared with a threshold, about: it stays in registers."""


def pairs(T: int, K: int) -> tuple[int, int]:
    """Causal pairs that must be scored (queries that see more than K keys), and chosen pairs."""
    few = min(T, K)
    all_pairs, few_pairs = T * (T + 1) // 2, few * (few + 1) // 2
    return all_pairs - few_pairs, few_pairs + (T - few) * K


def gradient_cost(T: int, N: int, D: int, K: int, b: int) -> PassCost:
    """LIG at chosen keys: scores again, dq, dk; dk by fp32 atomics."""
    _, chosen = pairs(T, K)
    product = 2 * N * D * chosen
    rows, wide = T * N * D * b, T * D * 4
    return PassCost(
        flops=3 * product + 6 * N * chosen,
        bytes_read=rows + chosen * (D * b + INDEX_BYTES + SCORE_BYTES) + chosen * D * 4 + wide,
        bytes_written=rows + chosen * D * 4 + T * D * b + T * N * b + wide,
        launches=1,
        workspace_bytes=wide,
        floor_flops=3 * product,
        floor_bytes=2 * (rows + T * D * b + T * N * b) + chosen * (INDEX_BYTES + SCORE_BYTES),
    )


def cost(T: int, N: int, D: int, K: int, dtype: str, *, weight_gradient: bool = False) -> OpCost:
    """Work over ``q [T, N, D]``, ``k [T, D]``, causal, one sequence.

    Forward scores and chooses; backward is that of the scores at the chosen keys.

    Args:
        weight_gradient: accepted for the common signature; there is no weight here.
    """
    del weight_gradient
    b = BYTES[dtype]
    scored, _ = pairs(T, K)
    plan = chunks(T, 0)
    inputs = (T * N * D + T * D + T * N) * b
    forward = PassCost(
        flops=2 * N * D * scored + 3 * N * scored + COUNTS * scored,
        bytes_read=inputs + scored * (SCORE_BYTES + D * b // QUERIES + N * D * b // SCORE.keys),
        bytes_written=scored * SCORE_BYTES + T * K * INDEX_BYTES,
        launches=2 * max(1, len(plan)),
        workspace_bytes=max((c.rows * c.stride for c in plan), default=0) * SCORE_BYTES,
        floor_flops=2 * N * D * scored,
        floor_bytes=inputs + T * K * INDEX_BYTES,
    )
    return OpCost(
        op="dsa_indexer",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "N": N, "D": D, "K": K},
        forward=forward,
        backward=gradient_cost(T, N, D, K, b),
        saved_bytes=T * K * INDEX_BYTES,
    )
