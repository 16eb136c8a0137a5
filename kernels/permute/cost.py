"""Counted work of permute and combine. No torch, no device, no milliseconds.

Legend: T tokens, K experts a token, E experts, R = T·K rows, H hidden, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.kernels.permute import configs
from shardwright.schemas.ops import OpCost, PassCost

INDEX_BYTES = 4


def cost(T: int, K: int, E: int, H: int, dtype: str, *, weight_gradient: bool = True) -> OpCost:
    """Work of routing metadata, gather and combine together (the split operators around the exchange).

    Args:
        weight_gradient: whether the routing weights learn.
    """
    b, rows = BYTES[dtype], T * K
    metadata = rows * INDEX_BYTES * 6 + E * INDEX_BYTES * 4
    forward = PassCost(
        flops=2 * rows * H,
        bytes_read=T * H * b + rows * H * b + metadata,
        bytes_written=rows * H * b + T * H * b + metadata // 2,
        launches=configs.metadata_launches(rows, E) + 2,
        floor_flops=2 * rows * H,
        floor_bytes=2 * (T + rows) * H * b,
    )
    backward = PassCost(
        flops=(4 if weight_gradient else 2) * rows * H,
        bytes_read=T * H * b + (2 if weight_gradient else 1) * rows * H * b,
        bytes_written=rows * H * b + T * H * b,
        launches=2,
        floor_flops=(4 if weight_gradient else 2) * rows * H,
        floor_bytes=2 * (T + rows) * H * b + (rows * H * b if weight_gradient else 0),
    )
    return OpCost(
        op="permute",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "K": K, "E": E, "H": H},
        forward=forward,
        backward=backward,
        saved_bytes=rows * H * b + rows * INDEX_BYTES,
    )
