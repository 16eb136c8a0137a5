"""Counted work of the packed experts. No torch, no device, no milliseconds.

Legend: R rows, E experts, H hidden, I expert width, F = 2I with a gate (else I), r rank.
"""

from __future__ import annotations

from fractions import Fraction

from shardwright.kernels.packed_experts import configs
from shardwright.schemas.ops import OpCost, PassCost

STORED: dict[str, Fraction] = {"mxfp4": Fraction(17, 32), "fp8": 1 + Fraction(4, 128 * 128)}
"""Bytes of one weight with its share of scales."""
KINDS = {4: "mxfp4", 8: "fp8"}
"""Bits of a stored value → how it is packed."""
VALUE = 2
"""Bytes of one bf16 value."""


def cost(
    R: int,
    E: int,
    H: int,
    I: int,
    dtype: str = "bfloat16",
    *,
    r: int = 0,
    gated: bool = True,
    bits: int = 4,
    weight_gradient: bool = False,
) -> OpCost:
    """Work of forward and backward over rows ``[R, H]`` sorted by expert; the base is packed and frozen.

    Floors read each expert's packed weights once a pass, and every row once. Biases (one value for some 1,500 bytes of
    weights at gpt-oss's width) are not counted. From ``configs.DEQUANTISE_ROWS`` rows
    an expert on, both passes of training share one dequantised copy, which the forward writes.

    Args:
        dtype: of rows and adapters: bf16.
        r: rank of the adapters on both stacks; 0 without LoRA.
        bits: of a stored weight: one of ``KINDS``.
        weight_gradient: must be False: there is no gradient of the base.
    """
    F, used, stored = (2 if gated else 1) * I, min(E, R), STORED[KINDS[bits]]
    weights = F * H + H * I
    packed, wide = int(used * weights * stored), E * weights * VALUE
    copies = configs.dequantises(R, E, trains=True) and R > 0
    adapters, low = used * r * (H + F + I + H) * VALUE, 2 * R * r * (H + F + I + H)
    products = 2 * R * weights
    forward = PassCost(
        flops=products + low + 8 * R * I,
        bytes_read=(int(E * weights * stored) + wide if copies else packed)
        + adapters
        + R * (H + I + (H + I + 4 * r) * (r > 0)) * VALUE,
        bytes_written=(wide if copies else 0) + R * (F + I + H + 2 * r) * VALUE,
        launches=(2 if copies else 0) + (5 if r else 3),
        workspace_bytes=(wide if copies else 0) + R * (I + H) * VALUE,
        floor_flops=products + low,
        floor_bytes=packed + adapters + 2 * R * H * VALUE,
    )
    backward = PassCost(
        flops=products + 2 * low + 16 * R * I,
        bytes_read=(wide if copies else packed)
        + adapters
        + R * (H + 3 * F + I + (2 * H + 2 * F + I + 8 * r) * (r > 0)) * VALUE,
        bytes_written=R * (F + I + H + 2 * r) * VALUE + adapters,
        launches=(1 if copies else 0) + (7 if r else 3),
        workspace_bytes=wide + R * (2 * r or I) * VALUE if copies else R * (F + 2 * r) * VALUE,
        floor_flops=products + 2 * low,
        floor_bytes=packed + 2 * adapters + R * (2 * H + F) * VALUE,
    )
    return OpCost(
        op="packed_experts",
        provider="shardwright",
        dtype=dtype,
        shape={"R": R, "E": E, "H": H, "I": I, "r": r},
        forward=forward,
        backward=backward,
        saved_bytes=R * (F + (I + 2 * r) * (r > 0)) * VALUE,
    )
