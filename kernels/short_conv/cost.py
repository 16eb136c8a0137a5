"""Counted work of the short convolution. No torch, no device, no milliseconds.

Legend: T tokens of all documents, C channels, J taps, b bytes a value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.kernels.short_conv.configs import piece
from shardwright.schemas.ops import OpCost, PassCost

SILU_FLOPS, SILU_GRADIENT_FLOPS = 5, 8


def cost(T: int, C: int, J: int, dtype: str, *, docs: int = 1, weight_gradient: bool = True) -> OpCost:
    """Work of forward and backward over x ``[T, C]`` and weight ``[C, J]``.

    The backward makes each sum once more, and those of the J - 1 tokens after each piece; a share of the taps'
    gradient a piece is written and summed.
    """
    b, tokens = BYTES[dtype], piece(T, C)
    pieces = -(-T // tokens) + docs - 1
    width, taps, shares = T * C * b, C * J * 4, pieces * C * J * 4
    least, ahead = T * C * (2 * J + SILU_FLOPS), pieces * C * (J - 1)
    again = (T * C + ahead) * (2 * J + SILU_GRADIENT_FLOPS) + T * C * 2 * J
    forward = PassCost(
        flops=least,
        bytes_read=width + taps,
        bytes_written=width,
        launches=1,
        floor_flops=0,
        floor_bytes=2 * width + taps,
    )
    backward = PassCost(
        flops=again + (T * C * 2 * J if weight_gradient else 0),
        bytes_read=2 * width + taps + (shares if weight_gradient else 0),
        bytes_written=width + ((shares + taps) if weight_gradient else 0),
        launches=2 if weight_gradient else 1,
        workspace_bytes=shares if weight_gradient else 0,
        floor_flops=0,
        floor_bytes=3 * width + taps + (taps if weight_gradient else 0),
    )
    return OpCost(
        op="short_conv",
        provider="shardwright",
        dtype=dtype,
        shape={"T": T, "C": C, "J": J, "docs": docs},
        forward=forward,
        backward=backward,
        saved_bytes=0,
    )
