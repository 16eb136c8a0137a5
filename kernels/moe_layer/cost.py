"""Counted work of the whole MoE layer. No torch, no device, no milliseconds.

Legend: T tokens, K experts a token, E experts, R = T·K rows, H hidden, I expert width, r rank.
"""

from __future__ import annotations

from shardwright.kernels.grouped_lora_mlp.cost import cost as grouped_cost
from shardwright.kernels.guards import BYTES
from shardwright.kernels.permute import configs
from shardwright.schemas.ops import OpCost, PassCost


def cost(
    T: int,
    K: int,
    E: int,
    H: int,
    I: int,
    dtype: str,
    *,
    r: int = 0,
    gated: bool = True,
    weight_gradient: bool = False,
) -> OpCost:
    """Work of the layer on one device: routing metadata, experts on gathered rows, weighted sum to tokens.

    Metadata and the sum to tokens stand in place of the tile list and the zeros of received rows. Floors replace the
    rows' traffic by the tokens': a token is read once and written once, not K times.
    """
    b, R = BYTES[dtype], T * K
    inner = grouped_cost(R, E, H, I, dtype, r=r, gated=gated)
    assert inner.backward is not None
    index = 10 * R * 4

    def widen(part: PassCost, launches: int, floor_rows: int) -> PassCost:
        return part.model_copy(
            update={
                "flops": part.flops + 2 * R * H,
                "bytes_read": part.bytes_read + R * H * b + index,
                "bytes_written": part.bytes_written + T * H * b + index // 2,
                "launches": part.launches + launches,
                "workspace_bytes": part.workspace_bytes + index,
                "floor_bytes": part.floor_bytes - 2 * R * H * b + floor_rows * T * H * b,
            }
        )

    return OpCost(
        op="moe_layer",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "K": K, "E": E, "H": H, "I": I, "r": r},
        forward=widen(inner.forward, configs.metadata_launches(R, E) - 1, 2),
        backward=widen(inner.backward, 0, 2),
        saved_bytes=inner.saved_bytes + 2 * R * 4,
    )
