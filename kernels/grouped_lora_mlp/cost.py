"""Counted work of the grouped LoRA MLP. No torch, no device, no milliseconds.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank, b bytes per value.
"""

from __future__ import annotations

from shardwright.kernels.guards import BYTES
from shardwright.schemas.ops import OpCost, PassCost


def cost(
    R: int, E: int, H: int, I: int, dtype: str, *, r: int = 0, gated: bool = True, weight_gradient: bool = False
) -> OpCost:
    """Work of forward and backward over rows ``[R, H]`` sorted by expert; the base is frozen.

    The backward makes dx and, with a rank, the adapters' gradients. Launches count the tile list and the zeros for
    rows of no expert, and an activation in its product's epilogue. Floors read each expert's weights once
    a pass, and every row once; an expert without rows counts as read, so the floor holds for any routing
    only where every expert has rows. The backward writes dgu over gu and, with a rank, dh over h, as it does where the
    graph is not retained.

    Args:
        r: rank of the adapters on both stacks; 0 without LoRA.
        weight_gradient: must be False: there is no gradient of the base.
    """
    b, F = BYTES[dtype], (2 if gated else 1) * I
    stacks = min(E, R) * (F * H + H * I) * b
    adapters = min(E, R) * r * (H + F + I + H) * b
    low = 2 * R * r * (H + F + I + H)
    products = 2 * R * (F * H + H * I)
    forward = PassCost(
        flops=products + low + 8 * R * I,
        bytes_read=stacks + adapters + R * (H + I + (H + I + 4 * r) * (r > 0)) * b,
        bytes_written=R * (F + I + H + 2 * r) * b,
        launches=6 if r else 4,
        workspace_bytes=R * (I + H) * b,
        floor_flops=products + low,
        floor_bytes=stacks + adapters + 2 * R * H * b,
    )
    backward = PassCost(
        flops=products + 2 * low + 16 * R * I,
        bytes_read=stacks + adapters + R * (H + 3 * F + I + (2 * H + 2 * F + I + 8 * r) * (r > 0)) * b,
        bytes_written=R * (F + I + H + 2 * r) * b + adapters,
        launches=8 if r else 4,
        workspace_bytes=R * (2 * r or I) * b,
        floor_flops=products + 2 * low,
        floor_bytes=stacks + 2 * adapters + R * (2 * H + F) * b,
    )
    return OpCost(
        op="grouped_lora_mlp",
        provider="shardwright",
        dtype=dtype,
        shape={"R": R, "E": E, "H": H, "I": I, "r": r},
        forward=forward,
        backward=backward,
        saved_bytes=R * (F + (I + 2 * r) * (r > 0)) * b,
    )
