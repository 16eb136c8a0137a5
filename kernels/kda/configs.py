"""Launch configurations of KDA. Data; no torch.

Timed on one H200 (T 8192, H 32, K = V = 128, bf16, bounded gate), forward and backward, ms, by the keys kernel's tile:
4.02 with 64 channels and 64 columns in 8 warps, 4.26 (64, 32, 8), 4.29 (32, 32, 4), 5.18 (16, 32, 4) and 5.37
(32, 32, 8). Of 32 channels in 4 warps with 64 columns, of 16 with 64 and of 32 in 8 warps with 64, ptxas 12.8 makes
code that reads elsewhere (``kernels.machine_code``), as it does of the scan with 256 channels in 4 warps. One gate a
head: 2.76 (32, 32, 4), 3.02 (32, 64, 8), 3.35 (32, 32, 8). The choice for prepare is by count, not by time: 168
registers let three programs share a multiprocessor.

Legend: K key width, V value width, HV value heads, N documents.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64
"""Tokens of a chunk."""
MANY_CHANNELS = 256
"""Key channels from which on a state of 16 columns in 4 warps is left to 32 in 8."""
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
    return Tile(BK=32, BV=32, warps=4, stages=1, registers=168)


def scan(K: int, V: int, value_bytes: int, columns: int, multiprocessors: int) -> Tile:
    """Value columns are split until the programs fill the device, no narrower than ``MANY_CHANNELS`` allows.

    Args:
        columns: value heads times documents.
    """
    least = 16 if K < MANY_CHANNELS else 32
    BV = min(V, 128)
    while least < BV and columns * (V // BV) < multiprocessors * 3 // 4:
        BV //= 2
    few = K < MANY_CHANNELS and K * BV <= 8192
    return Tile(BK=K, BV=BV, warps=4 if few else 8, stages=2 if K * value_bytes <= 256 else 1)


def reverse(K: int, V: int, value_bytes: int, columns: int, multiprocessors: int) -> Tile:
    return scan(K, V, value_bytes, columns, multiprocessors)


def values(K: int, V: int, value_bytes: int) -> Tile:
    return Tile(BK=K, BV=64, warps=4, stages=1)


def keys(K: int, V: int, value_bytes: int) -> Tile:
    return Tile(BK=64, BV=64, warps=8, stages=1)


PART = 8192
"""Chunks times value heads whose gradients are made in one launch: the pair gradients of no more are kept at once."""


def part(chunks: int, heads: int) -> int:
    """Chunks of one part of the gradients; at least 1."""
    return max(1, PART // heads)


def scalar_prepare(K: int, V: int, value_bytes: int) -> Tile:
    return Tile(BK=64, BV=64, warps=4, stages=1)


def scalar_gate() -> Tile:
    return Tile(BK=16, BV=0, warps=4, stages=1)


def scalar_keys(K: int, V: int, value_bytes: int) -> Tile:
    return Tile(BK=32, BV=32, warps=4, stages=1)


def step(K: int) -> Tile:
    return Tile(BK=K, BV=32 if K <= 128 else 16, warps=4, stages=1)


def summary(K: int, value_bytes: int) -> Tile:
    return Tile(BK=K, BV=32, warps=4, stages=2 if K * value_bytes <= 256 else 1)


def combine(K: int) -> Tile:
    return Tile(BK=32, BV=16, warps=4, stages=1)


def pieces(chunks: int, columns: int, V: int, multiprocessors: int) -> int:
    """Into how many pieces the longest document of ``chunks`` is cut; 1 where splitting value columns fills the device.

    The chain is then run twice over a piece (five times in a backward, in place of two): for the piece's own effect and
    with its first state. So a cut pays from four pieces up, and pieces shorter than ``PIECE`` not for their launches.

    Args:
        columns: value heads times documents.
    """
    programs = columns * max(1, V // 32)
    if programs >= multiprocessors * 3 // 4:
        return 1
    found = min(multiprocessors // programs, chunks // PIECE)
    return found if found >= LEAST_PIECES else 1


PIECE, LEAST_PIECES = 16, 4
"""Chunks of the shortest piece, and the fewest pieces of a cut."""

SOLVE = "tf32"
"""How the triangular inverse multiplies in 16-bit runs."""
