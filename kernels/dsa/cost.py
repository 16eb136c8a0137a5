"""Counted work of a layer of sparse attention, and of gated dense attention. No torch, no device, no milliseconds.

Legend: T queries and keys, H heads, N indexer heads, D indexer width, K selected keys, V width of the latent, R rotated
width, A and B widths of a head's plain key and its value, b bytes per value. In dense attention D, V are widths of key
and value.
"""

from __future__ import annotations

from shardwright.kernels.dsa.attention.cost import cost as attention_cost
from shardwright.kernels.dsa.indexer.cost import cost as indexer_cost
from shardwright.kernels.guards import BYTES
from shardwright.schemas.ops import OpCost, PassCost

COUNTS = ("flops", "bytes_read", "bytes_written", "launches", "floor_flops", "floor_bytes")


def cost(
    T: int,
    H: int,
    dtype: str,
    *,
    N: int,
    D: int,
    K: int,
    V: int,
    R: int,
    A: int = 0,
    B: int = 0,
    weight_gradient: bool = False,
) -> OpCost:
    """The choice, then attention forward and backward; a frozen indexer has no backward. N 0: a selection is given.

    K 0 with a width B: the same door without a selection, which is dense attention of keys A + R wide.
    """
    if not K and B:
        return dense_cost(T, H, dtype, D=A + R, V=B, weight_gradient=weight_gradient)
    behind = attention_cost(T, H, T, K, V, dtype, R=R, weight_gradient=weight_gradient)
    forward, workspace = behind.forward, behind.forward.workspace_bytes
    if N:
        chosen = indexer_cost(T, N, D, K, dtype).forward
        counts = {name: getattr(chosen, name) + getattr(behind.forward, name) for name in COUNTS}
        forward = PassCost(**counts, workspace_bytes=max(chosen.workspace_bytes, workspace))
    return OpCost(
        op="dsa",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "H": H, **{k: n for k, n in {"N": N, "D": D}.items() if n}, "K": K, "V": V, "R": R},
        forward=forward,
        backward=behind.backward,
        saved_bytes=behind.saved_bytes + (T * K * 4 if N else 0),
    )


def dense_cost(T: int, H: int, dtype: str, *, D: int, V: int, weight_gradient: bool = False) -> OpCost:
    """A library's causal attention of keys D and values V wide, and one pass of the gate over its output.

    Forward 2 · T²/2 · H · (D + V) flops; backward scores again, dP, dQ, dK and dV: 2 · T²/2 · H · (3D + 2V).
    """
    del weight_gradient
    b, n = BYTES[dtype], T * (T + 1) // 2
    qkv, o = T * H * (2 * D + V) * b, T * H * V * b
    forward = PassCost(
        flops=2 * n * H * (D + V),
        bytes_read=qkv + 2 * o,
        bytes_written=2 * o,
        launches=2,
        floor_flops=2 * n * H * (D + V),
        floor_bytes=qkv + 2 * o,
    )
    backward = PassCost(
        flops=2 * n * H * (3 * D + 2 * V),
        bytes_read=qkv + 5 * o,
        bytes_written=qkv + 2 * o,
        launches=4,
        floor_flops=2 * n * H * (3 * D + 2 * V),
        floor_bytes=2 * qkv + 4 * o,
    )
    return OpCost(
        op="dsa",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "H": H, "D": D, "V": V},
        forward=forward,
        backward=backward,
        saved_bytes=qkv + 2 * o + T * H * 4,
    )
