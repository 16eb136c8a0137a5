"""Counted work of sparse attention. No torch, no device, no milliseconds.

Legend: T queries, S keys, H query heads, G key heads, K entries, B keys of an entry, V width of the latent (of q, k
and v in the grouped form), R rotated width, b bytes per value, W columns of a key's gradient.
"""

from __future__ import annotations

from shardwright.kernels.dsa.attention.configs import RUN_BYTES, run_tokens
from shardwright.kernels.guards import BYTES
from shardwright.schemas.ops import OpCost, PassCost

STATISTIC_BYTES = 4
INDEX_BYTES = 4
SUM_BYTES = 4


def pairs(T: int, S: int, K: int, B: int = 1) -> int:
    """Query-key pairs of a causal selection: the last T of S positions, each with what it can see of K · B keys."""
    most = min(K * B, S)
    early = min(T, max(0, most - 1 - (S - T)))
    first = S - T + 1
    return early * first + early * (early - 1) // 2 + (T - early) * most


def cost(
    T: int,
    H: int,
    S: int,
    K: int,
    V: int,
    dtype: str,
    *,
    R: int = 0,
    G: int = 0,
    B: int = 1,
    kind: int = 0,
    weight_gradient: bool = False,
) -> OpCost:
    """Work over the selected pairs; keys and queries cross device memory once, gathers hit the cache.

    Forward 2 · pairs · H · (2V + R) flops; backward 2 · pairs · H · (5V + 3R): scores and dP again, dQ, dK and dV.

    Args:
        R: 0 in the grouped form.
        G: key heads of the grouped form; 0 for the latent form.
        kind: how a case draws its selection; it changes no count.
        weight_gradient: accepted for the common signature; the operator has no weight.
    """
    del kind, weight_gradient
    b, n = BYTES[dtype], pairs(T, S, K, B)
    heads = max(1, G)
    wide = V + R + (V if G else 0)
    q, o = T * H * (V + R) * b, T * H * V * b
    kv, index = S * heads * wide * b, T * heads * K * INDEX_BYTES
    rows = T * H * STATISTIC_BYTES
    forward = PassCost(
        flops=2 * n * H * (2 * V + R) + 6 * n * H,
        bytes_read=q + kv + index,
        bytes_written=2 * o + rows,
        launches=1,
        floor_flops=2 * n * H * (2 * V + R),
        floor_bytes=q + kv + index + o + rows,
    )
    sums = S * heads * wide * SUM_BYTES
    run = run_tokens(max(1, T), H, heads, max(1, K * B), wide, b, pairs=False)
    backward = PassCost(
        flops=2 * n * H * (5 * V + 3 * R) + 8 * n * H,
        bytes_read=3 * q + 4 * o + 2 * kv + index + 2 * rows + sums,
        bytes_written=2 * q + o + 2 * kv + 2 * sums + rows,
        launches=8,
        workspace_bytes=max(q + o + kv, min(RUN_BYTES, run * 2 * H * K * B * b)) + sums + rows,
        floor_flops=2 * n * H * (5 * V + 3 * R),
        floor_bytes=2 * q + 2 * o + 2 * kv + index + rows,
    )
    return OpCost(
        op="dsa_attention",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "H": H, "S": S, "K": K, "V": V, **{k: v for k, v in {"R": R, "G": G}.items() if v}},
        forward=forward,
        backward=backward,
        saved_bytes=2 * o + rows,
    )
