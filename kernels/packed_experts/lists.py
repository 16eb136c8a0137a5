"""The tile list of one call: made by the forward's first launch, read again by its backward.

Legend: R rows, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.packed_experts import configs
from shardwright.kernels.packed_experts.lists_triton import begin_kernel
from shardwright.kernels.permute import configs as permute_configs
from shardwright.kernels.permute.tiles import Tiles, buffer_size

LISTS = ("expert", "first", "last")
PARTS = ("offsets", *LISTS, "count")
"""Parts of a list, by name."""


@dataclass(frozen=True)
class CutTiles(Tiles):
    """A tile list whose parts are cut out of the buffer at once: one by one they cost the host as much as a launch."""

    parts: tuple[Tensor, ...]
    """In the order of ``PARTS``."""

    @property
    def offsets(self) -> Tensor:
        return self.parts[0]

    @property
    def count(self) -> Tensor:
        return self.parts[4]

    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        _, expert, first, last, _ = self.parts
        return expert, first, last


class Cuts(NamedTuple):
    """How a buffer is split: lengths of the pieces, and which of them are the parts."""

    lengths: list[int]
    parts: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


@lru_cache(maxsize=4096)
def _cuts(experts: int, most: int) -> Cuts:
    """Parts lie where ``Tiles`` itself puts them."""
    size = buffer_size(experts, most)
    whole = Tiles(torch.empty(size, dtype=torch.int32, device="meta"), experts, most)
    parts = (whole.offsets, *whole.lists(), whole.count)
    lengths: list[int] = []
    place, end = [0] * len(parts), 0
    for start_at, length, at in sorted((int(p.storage_offset()), p.numel(), at) for at, p in enumerate(parts)):
        lengths.append(start_at - end)
        place[at] = len(lengths)
        lengths.append(length)
        end = start_at + length
    return Cuts([*lengths, size - end], itemgetter(*place))


def cut(buffer: Tensor, experts: int, most: int) -> CutTiles:
    """A list of at most ``most`` tiles that lies in ``buffer``."""
    lengths, parts = _cuts(experts, most)
    return CutTiles(buffer, experts, most, parts(buffer.split_with_sizes(lengths)))


def parts_of(tiles: Tiles) -> tuple[Tensor, ...]:
    """A list's parts in the order of ``PARTS``."""
    return tiles.parts if isinstance(tiles, CutTiles) else (tiles.offsets, *tiles.lists(), tiles.count)


def empty(rows: int, experts: int, place: torch.device, tile_rows: int) -> CutTiles:
    """A list with room for every distribution of ``rows`` rows over tiles of at most ``tile_rows``; nothing is set."""
    most = permute_configs.most_tiles(rows, experts, tile_rows)
    return cut(torch.empty(buffer_size(experts, most), dtype=torch.int32, device=place), experts, most)


def launch_begin(counts: Tensor, tiles: CutTiles, y: Tensor, tile_rows: int, token: object | None = None) -> None:
    """Fill ``tiles`` from ``counts [E]``, which are cut where they pass R rows in all, and zero the rows of
    ``y [R, H]`` that belong to no expert."""
    tensors, key = (counts, *tiles.parts, y), key_of(token, "begin")
    if again(key, tensors):
        return
    R, H = y.shape
    with device.current(y):
        start(
            key,
            tensors,
            begin_kernel,
            (1 + -(-R // configs.TAIL_ROWS),),
            *tensors,
            R,
            tiles.experts,
            TILE=tile_rows,
            STEP=permute_configs.tile_step(tile_rows),
            BINS=permute_configs.power_of_two(tiles.experts),
            H=H,
            ROWS=configs.TAIL_ROWS,
            COLUMNS=configs.TAIL_COLUMNS,
            num_warps=configs.TAIL_WARPS,
        )
