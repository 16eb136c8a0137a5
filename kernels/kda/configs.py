"""Launch configurations of KDA. Data; no torch.

Timed on one H200 (T 8192, H 32, K = V = 128, bf16, bounded gate), forward and backward, ms, by the portable keys
kernel's tile, before it had a part of dbeta: 4.02 with 64 channels and 64 columns in 8 warps, 4.26 (64, 32, 8), 4.29
(32, 32, 4), 5.18 (16, 32, 4) and 5.37 (32, 32, 8). Of 32 channels in 4 warps with 64 columns, of 16 with 64 and of 32
in 8 warps with 64, ptxas 12.8 makes code that reads elsewhere (``kernels.machine_code``), as it does of the scan with
256 channels in 4 warps. One gate a head: 2.76 (32, 32, 4), 3.02 (32, 64, 8), 3.35 (32, 32, 8).

Legend: K key width, V value width, HV value heads, N documents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def pairs(K: int, V: int, value_bytes: int) -> Tile:
    """One warp; ``stages`` are copies to shared memory in flight. Fp32 is for the interpreter, where few steps count.

    On one H200 (T 8192, H 32, K 128, bf16), bounded and softplus gate, ms: 0.145 and 0.298; with 2 in flight 0.146 and
    0.305, with 4 0.150 and 0.307, with 32 channels 0.182 and 0.390. A kernel that makes w, u and decayed q and k in the
    same warp takes about 0.44, the two apart 0.31.
    """
    return Tile(BK=16 if value_bytes == 2 else 64, BV=0, warps=1, stages=3)


def widths(K: int, V: int, value_bytes: int) -> Tile:
    """On the same device, ms: 0.165; 0.184 at 128 registers, 0.179 in 8 warps, 0.187 with 32 channels. Memory alone
    would take 0.15. Running sums made here, not read, took about 0.29."""
    return Tile(BK=64, BV=64, warps=4, stages=1)


def scan(K: int, V: int, value_bytes: int, columns: int, multiprocessors: int, output: bool = True) -> Tile:
    """Value columns are split until the programs fill the device, no narrower than ``MANY_CHANNELS`` allows.

    What runs ahead of the chain decides: on one H200 (T 8192, H 32, K = V = 128) outputs take 0.258 ms with 2 chunks in
    flight and 0.160 with 3, states alone 0.270 with 2, 0.147 with 3, 0.138 with 4 and 0.143 with 5; 64 columns 0.203
    and 0.211 with 3.

    Args:
        columns: value heads times documents.
        output: whether outputs are made, which takes more shared memory for what runs ahead.
    """
    least = 16 if K < MANY_CHANNELS else 32
    BV = min(V, 128)
    while least < BV and columns * (V // BV) < multiprocessors * 3 // 4:
        BV //= 2
    few = K < MANY_CHANNELS and K * BV <= 8192
    if K * value_bytes > 256:
        stages = 1 if output else 2
    else:
        stages = 2 if not few else 3 if output else 4
    return Tile(BK=K, BV=BV, warps=4 if few else 8, stages=stages)


def reverse(K: int, V: int, value_bytes: int, columns: int, multiprocessors: int) -> Tile:
    """As ``scan``; on the same device 0.186 ms with 3 chunks in flight, 0.303 with 2.

    Of 256 channels with fewer than 64 columns ptxas 12.8 makes code that reads elsewhere (``kernels.machine_code``).
    """
    tile = scan(K, V, value_bytes, columns, multiprocessors)
    return replace(tile, BV=max(tile.BV, min(V, 64)), warps=8) if K >= MANY_CHANNELS else tile


def values(K: int, V: int, value_bytes: int) -> Tile:
    """64 columns would take more than 255 registers."""
    return Tile(BK=K, BV=32, warps=4, stages=1)


def keys(K: int, V: int, value_bytes: int) -> Tile:
    """64 channels spill 220 bytes, 16 none. Fp32 is for the interpreter, where few steps count."""
    return Tile(BK=16, BV=32, warps=4, stages=1) if value_bytes == 2 else Tile(BK=64, BV=64, warps=8, stages=1)


def keys_hopper() -> Tile:
    """On the same device the kernel alone took 0.71 ms before it had a part of dbeta, with 16 channels 0.83, with 64
    1.72; the portable one 1.59."""
    return Tile(BK=32, BV=32, warps=4, stages=1)


def strengths() -> Tile:
    """BK counts heads."""
    return Tile(BK=8, BV=0, warps=2, stages=1)


PART = 5504
"""Chunks times value heads whose gradients are made in one launch: the pair gradients of no more are kept at once.

T 32,768 with 32 heads takes three launches; three tiles of C x C for each are 135 MB."""


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
