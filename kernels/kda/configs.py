"""Launch configurations of KDA. Data; no torch.

Timed on one H200 (T 8192, H 32, K = V = 128, bf16, bounded gate), ms: prepare 0.51 in 4 warps against 0.73 in 8 and
0.66 with 128 channels in 8; keys 1.60 with 32 channels in 4 warps against 1.72 (64 in 4), 1.70 (64 in 8) and 2.64
(32 in 8). The values kernel with 32 columns stopped there with an illegal address, which neither the interpreter's
bounds nor the gate explain; it is used with 64 columns only.

Legend: K key width, V value width, HV value heads, N documents.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64
"""Tokens of a chunk."""
SMALL = 16
"""Tokens of the smallest block where the gate is bounded."""


@dataclass(frozen=True)
class Tile:
    """Block widths, warps and copies in flight of one kernel."""

    BK: int
    BV: int
    warps: int
    stages: int
    registers: int = 0
    """Most registers a thread; the compiler's choice where 0."""

    def options(self) -> dict[str, int]:
        """Launch options of triton."""
        found = {"num_warps": self.warps, "num_stages": self.stages}
        return {**found, "maxnreg": self.registers} if self.registers else found


def gate(K: int, value_bytes: int) -> Tile:
    return Tile(BK=64, BV=0, warps=4, stages=1)


def prepare(K: int, V: int, value_bytes: int) -> Tile:
    return Tile(BK=64, BV=64, warps=4, stages=1)


def scan(K: int, V: int, value_bytes: int, columns: int, multiprocessors: int) -> Tile:
    """Value columns are split until the programs fill the device.

    Args:
        columns: value heads times documents.
    """
    BV = min(V, 128)
    while BV > 16 and columns * (V // BV) < multiprocessors * 3 // 4:
        BV //= 2
    return Tile(BK=K, BV=BV, warps=4 if K * BV <= 8192 else 8, stages=2 if K * value_bytes <= 256 else 1)


def reverse(K: int, V: int, value_bytes: int, columns: int, multiprocessors: int) -> Tile:
    return scan(K, V, value_bytes, columns, multiprocessors)


def values(K: int, V: int, value_bytes: int) -> Tile:
    return Tile(BK=K, BV=64, warps=4, stages=1)


def keys(K: int, V: int, value_bytes: int) -> Tile:
    return Tile(BK=32, BV=64, warps=4, stages=1)


SOLVE = "tf32"
"""How the triangular inverse multiplies in 16-bit runs."""
