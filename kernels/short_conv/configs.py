"""Launch configurations of the short convolution. Data; no torch.

Timed on one H200 (bf16, J = 4, 8,192 tokens of 12,288 channels), ms: forward 0.114 (0.110 with 128 channels, whose
8-byte loads the compile gate refuses; 0.114 to 0.144 the other seven); backward 0.159 without and 0.179 with the taps'
gradient (0.159 to 0.183 and 0.179 to 0.208 the other twelve). Pieces of 128 tokens: forward 0.126, backward 0.161 and
0.172. Memory alone takes 0.094 and 0.141.

Legend: T tokens, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Walk:
    """How a program goes down its piece."""

    channels: int
    rows: int
    """Tokens of a step, a divisor of a piece's: as many rows are on their way while those before are computed."""
    stages: int
    """1: the next step's rows fly into registers. More: those of ``stages - 1`` steps into shared memory."""
    warps: int

    def options(self) -> dict[str, int]:
        """Launch options of triton."""
        return {"num_warps": self.warps, "num_stages": 1}


@dataclass(frozen=True)
class Sums:
    """Block of the sum over pieces: pieces, channels, warps."""

    pieces: int
    channels: int
    warps: int


SUMS = Sums(pieces=32, channels=128, warps=4)
MANY_VALUES = 1 << 24
"""Values of x from which on pieces of 64 tokens fill an H200: 2,048 programs of the backward."""


def forward() -> Walk:
    return Walk(channels=256, rows=4, stages=1, warps=1)


def backward() -> Walk:
    return Walk(channels=128, rows=4, stages=3, warps=1)


def piece(T: int, C: int) -> int:
    """Tokens of a piece. Each is read and computed with J - 1 more, so short ones are for few values only."""
    if T * C >= MANY_VALUES:
        return 64
    return 32 if 2 * T * C >= MANY_VALUES else 16
