"""The least time that a pass can take: its fewest bytes and flops over what a device reaches."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.kernels.guards import BYTES
from shardwright.kernels.timing import product_flops_per_second
from shardwright.kernels.where import Where
from shardwright.schemas.ops import OpCost

CEILING_BYTES_PER_S = {"NVIDIA H200": 4.3e12}
"""Copy bandwidth behind the stated floors, bytes read plus written, measured on that device; for another
device the copy measured in the same process is used."""

CEILING_FLOPS_PER_S = {("NVIDIA H200", 2): 790e12, ("NVIDIA H200", 4): 60e12}
"""Device and value bytes → rate of matrix products behind the stated floors: tensor cores in 16-bit types,
plain multiply-adds in fp32. For another device the product measured in the same process is used."""


@dataclass(frozen=True)
class Ceilings:
    """What floors divide by."""

    bytes_per_s: float
    flops_per_s: float

    @staticmethod
    def of(where: Where, dtype: str) -> Ceilings:
        """Those of a known device, measured ones for another."""
        flops = CEILING_FLOPS_PER_S.get((where.device, BYTES[dtype])) or product_flops_per_second(dtype)
        return Ceilings(CEILING_BYTES_PER_S.get(where.device, where.copy_bytes_per_s), flops)


def floor_parts(cost: OpCost, name: str) -> tuple[int, int]:
    """The fewest bytes and the fewest flops that a pass must spend."""
    forward, backward = (cost.forward.floor_bytes, cost.forward.floor_flops), (0, 0)
    if cost.backward is not None:
        backward = (cost.backward.floor_bytes, cost.backward.floor_flops)
    parts = {"fwd": (forward,), "bwd": (backward,)}.get(name, (forward, backward))
    return sum(moved for moved, _ in parts), sum(flops for _, flops in parts)


def floor_of(cost: OpCost, name: str, ceilings: Ceilings) -> tuple[float, dict[str, float]]:
    """The floor in ms, the larger of bytes and flops over the ceilings; and both parts with those ceilings."""
    moved, flops = floor_parts(cost, name)
    bytes_ms = moved / ceilings.bytes_per_s * 1e3
    flops_ms = flops / ceilings.flops_per_s * 1e3
    stated = {
        "floor_bytes_ms": round(bytes_ms, 5),
        "floor_flops_ms": round(flops_ms, 5),
        "ceiling_tb_per_s": round(ceilings.bytes_per_s / 1e12, 3),
        "ceiling_tflop_per_s": round(ceilings.flops_per_s / 1e12, 1),
    }
    return max(bytes_ms, flops_ms), stated
