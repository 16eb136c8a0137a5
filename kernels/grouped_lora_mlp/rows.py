"""What one call's launches share: its rows, and an adapter's low-rank term.

Legend: R rows, E experts, r rank, K slots a token, N width.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from shardwright.kernels.permute.op import Tiles


@dataclass(frozen=True)
class Rows:
    """The sorted rows of one call: their tiles, and where each comes from if they are gathered from tokens."""

    count: int
    """R, an upper bound known to the host."""
    tiles: Tiles
    entry: Tensor | None = None
    """int32 ``[R]``: token · K + slot, or ``None`` where rows lie in expert order already."""
    slots: int = 1
    token: Hashable = None
    """What launches are bound under (``kernels.bound``), together with their role in the layer."""


@dataclass(frozen=True)
class LowRank:
    """An adapter's product ``z [R, r]`` and the factor ``b`` that takes it to the wide side.

    ``stride_n`` and ``stride_r`` say how ``b`` lies: [E, N, r] or [E, r, N].
    """

    z: Tensor
    b: Tensor
    rank: int
    stride_n: int
    stride_r: int
