"""Counted work of the indexer's loss. No torch, no device, no milliseconds.

Legend: T queries and keys, N indexer heads, D indexer width, H attention heads, M attention width, k chosen keys,
b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.dsa.indexer.configs import SCORE_BYTES, SPLITS, chunks
from shardwright.kernels.dsa.indexer.cost import INDEX_BYTES, pairs
from shardwright.kernels.dsa.kl.configs import ROW_BYTES, chunk_rows
from shardwright.kernels.guards import BYTES
from shardwright.schemas.ops import OpCost, PassCost

WIDE = 4


def cost(T: int, N: int, D: int, K: int, H: int, M: int, dtype: str, *, weight_gradient: bool = False) -> OpCost:
    """Work with one attention key head; K 0 is the dense warm-up, over all T(T + 1)/2 pairs.

    Forward makes scores, target, loss and the gradients (four products of the indexer, one of the attention; one
    more where keys' gradients are made without atomics). Backward scales dq, dk and dw.

    Args:
        weight_gradient: accepted for the common signature; there is no weight here.
    """
    del weight_gradient
    b = BYTES[dtype]
    count = pairs(T, K)[1] if K else T * (T + 1) // 2
    mine, theirs = 2 * N * D * count, 2 * H * M * count
    learner, teacher = (T * N * D + T * D + T * N) * b, (T * H * M + T * M) * b + T * H * WIDE
    gradients = T * N * D * b + T * D * WIDE + T * N * WIDE
    index_bytes = T * K * INDEX_BYTES
    plan = len(chunks(T, 0, ROW_BYTES)) if not K else -(-T // chunk_rows(T, K))
    scatter = count * D * WIDE if K else SPLITS * T * D * WIDE
    forward = PassCost(
        flops=(4 if K else 5) * mine + theirs + 8 * (N + H) * count,
        bytes_read=2 * learner + teacher + index_bytes * 3 + count * (3 * D + M) * b + count * 5 * WIDE + scatter,
        bytes_written=gradients + count * 3 * WIDE + scatter,
        launches=(4 if K else 5) * max(1, plan),
        workspace_bytes=min(SCORE_BYTES, 2 * T * (K or T) * WIDE),
        floor_flops=3 * mine + theirs + mine,
        floor_bytes=learner + teacher + index_bytes + gradients,
    )
    backward = PassCost(
        flops=T * (N * D + D + N),
        bytes_read=gradients,
        bytes_written=learner,
        launches=3,
        floor_flops=0,
        floor_bytes=0,
    )
    return OpCost(
        op="dsa_kl",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "N": N, "D": D, "K": K, "H": H, "M": M},
        forward=forward,
        backward=backward,
        saved_bytes=gradients,
    )
