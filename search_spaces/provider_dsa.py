"""What eager torch costs for sparse latent attention as the families write it: a mask over all pairs.

Legend: T tokens, H heads, N indexer heads, D indexer width, K selected keys, V latent width, R rotated width, b bytes
per value.
"""

from __future__ import annotations

from shardwright.kernels.dsa.cost import cost as dsa_cost
from shardwright.schemas.ops import OpCost, PassCost
from shardwright.search_spaces.provider_chain import BYTES

HEAD, VALUE = 192, 128
"""Widths of a head's key and value once projected up, where a shape does not say: DeepSeek-V3.2's."""


def dsa(provider: str, dtype: str, T: int, H: int, N: int, D: int, K: int, V: int, R: int) -> OpCost:
    """Scores of every indexer head over all pairs in fp32, their choice, a mask ``[T, T]``, dense attention under it.

    Forward: the product, its scale, ReLU and head sum move ``[T, N, T]`` fp32 six times; the sum is masked, sorted and
    scattered. Attention under a mask skips no pair: 2·T²·H·(192 + 128) flops, 2.5 times that backward. The fp32
    product is counted at the rate of ``dtype``: a lower bound. Compiling fuses the passes over scores to two. Floors
    are those of the absorbed form over the selected pairs, or this one's own flops where a short sequence needs fewer.
    """
    ours, b = dsa_cost(T, H, dtype, N=N, D=D, K=K, V=V, R=R), BYTES[dtype]
    assert ours.backward is not None
    pairs, scores = T * T, 4 * T * N * T
    passes = 3 if provider == "eager" else 1
    qkv, o = T * H * (2 * HEAD + VALUE) * b, T * H * VALUE * b
    choice = 3 * 4 * pairs + 12 * T * K if N else 0
    flops = (2 * pairs * N * D + 3 * N * pairs + 2 * pairs * H * (HEAD + VALUE), 5 * pairs * H * (HEAD + VALUE))
    forward = PassCost(
        flops=flops[0],
        bytes_read=passes * scores + choice + 4 * pairs + qkv,
        bytes_written=passes * scores + choice + 3 * pairs + qkv + o,
        launches=24 if N else 12,
        workspace_bytes=2 * scores if N else 3 * pairs,
        floor_flops=min(flops[0], ours.forward.floor_flops),
        floor_bytes=ours.forward.floor_bytes,
    )
    backward = PassCost(
        flops=flops[1],
        bytes_read=2 * qkv + 3 * o + pairs,
        bytes_written=2 * qkv,
        launches=14,
        floor_flops=min(flops[1], ours.backward.floor_flops),
        floor_bytes=ours.backward.floor_bytes,
    )
    update = {"provider": provider, "forward": forward, "backward": backward, "saved_bytes": qkv + o + 2 * pairs}
    return ours.model_copy(update=update)
