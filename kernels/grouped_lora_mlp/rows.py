"""What one call's launches share: its rows, an adapter's low-rank term, and the product that a launch makes.

Legend: R rows, E experts, r rank, K slots a token, N width.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from shardwright.kernels.permute.tiles import Tiles


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


class LowRank(NamedTuple):
    """An adapter's product ``z [R, r]`` and the factor ``b`` that takes it to the wide side.

    ``stride_n`` and ``stride_r`` say how ``b`` lies: [E, N, r] or [E, r, N].
    """

    z: Tensor
    b: Tensor
    rank: int
    stride_n: int
    stride_r: int


class Product(NamedTuple):
    """One product ``x Wᵀ (+ z Bᵀ) (+ bias)``: all that a launch reads.

    ``w`` is [E, N, K] (``n_first``) or [E, K, N]; ``bias`` is [E, N]. With ``gather`` x holds tokens where the rows
    are gathered from tokens, else rows.
    """

    x: Tensor
    w: Tensor
    n_first: bool
    rows: Rows
    low: LowRank | None = None
    bias: Tensor | None = None
    gather: bool = False

    @property
    def gathered(self) -> bool:
        return self.gather and self.rows.entry is not None

    def tensors(self, y: Tensor, h: Tensor | None) -> tuple[Tensor | None, ...]:
        """Every tensor of a launch that fills ``y`` and, where given, ``h``."""
        z, b = (None, None) if self.low is None else (self.low.z, self.low.b)
        tiles = self.rows.tiles
        return (self.x, self.w, y, h, z, b, self.bias, self.rows.entry, tiles.offsets, *tiles.lists(), tiles.count)
