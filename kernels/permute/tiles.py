"""The tile list of rows sorted by expert: how the host sees it, and the launch that makes it from counts.

Legend: E experts, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.permute import configs
from shardwright.kernels.permute.triton import tile_kernel


@dataclass(frozen=True)
class Tiles:
    """The tile list of rows sorted by expert, in device memory. ``most`` bounds its length on the host.

    Views of the buffer are made once: a step launches a dozen kernels over one list.
    """

    buffer: Tensor
    """int32: offsets [E+1], number of tiles [1], then expert, first row, row after the last of each tile.

    Each part starts on a 16-byte boundary, so kernels see the same alignment for every E.
    """
    experts: int
    most: int

    @cached_property
    def offsets(self) -> Tensor:
        """int32 ``[E+1]``: expert e owns rows ``offsets[e] .. offsets[e+1]``."""
        return self.buffer[: self.experts + 1]

    @cached_property
    def count(self) -> Tensor:
        """int32 ``[1]``."""
        at = _whole(self.experts + 1)
        return self.buffer[at : at + 1]

    @cached_property
    def _lists(self) -> tuple[Tensor, Tensor, Tensor]:
        expert, first, last = self.buffer[_whole(self.experts + 1) + 4 :].view(3, -1).unbind()
        return expert, first, last

    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """``expert``, ``first`` and ``last``, int32 ``[most]`` each; only ``count`` of them are set."""
        return self._lists


def _whole(n: int) -> int:
    """``n`` 32-bit integers as whole 16-byte vectors."""
    return -(-n // 4) * 4


def buffer_size(experts: int, most: int) -> int:
    """Integers that ``Tiles.buffer`` holds for at most ``most`` tiles."""
    return _whole(experts + 1) + 4 + 3 * _whole(max(most, 1))


def tile_buffer_size(rows: int, experts: int) -> int:
    """Integers that ``Tiles.buffer`` holds for tiles of ``TILE_ROWS`` rows."""
    return buffer_size(experts, configs.most_tiles(rows, experts))


def empty_tiles(rows: int, experts: int, place: torch.device, tile_rows: int = configs.TILE_ROWS) -> Tiles:
    """A tile list with room for every distribution of ``rows`` rows; nothing in it is set."""
    most = configs.most_tiles(rows, experts, tile_rows)
    buffer = torch.empty(buffer_size(experts, most), dtype=torch.int32, device=place)
    return Tiles(buffer, experts, most)


def make_tiles(counts: Tensor, rows: int, token: object | None = None, tile_rows: int = configs.TILE_ROWS) -> Tiles:
    """Offsets and tiles of at most ``tile_rows`` rows from ``counts [E]`` (integers on the device); counts that
    pass ``rows`` rows in all are cut there."""
    E = counts.shape[0]
    tiles = empty_tiles(rows, E, counts.device, tile_rows)
    expert, first, last = tiles.lists()
    tensors, key = (counts, tiles.offsets, expert, first, last, tiles.count), key_of(token, "tiles")
    if again(key, tensors):
        return tiles
    with device.current(counts):
        start(
            key,
            tensors,
            tile_kernel,
            (1,),
            *tensors,
            rows,
            E,
            TILE=tile_rows,
            STEP=configs.tile_step(tile_rows),
            BINS=configs.power_of_two(E),
            num_warps=configs.WARPS,
        )
    return tiles
