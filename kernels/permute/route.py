"""Where each (token, slot) entry's row lies among rows sorted by expert: the launches that find it.

Ranks inside a chunk of entries come first. What follows, the sums over chunks and experts, the tiles and the
places, is three launches, or one in which each program reads every chunk's histogram: ``configs.metadata`` chooses.
No launch waits for the device: counts stay in its memory.

Legend: T tokens, K experts a token, N = T·K entries, E experts, R rows, M multiple of an expert's padded rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.permute import configs
from shardwright.kernels.permute.tiles import Tiles, empty_tiles, make_tiles
from shardwright.kernels.permute.triton import pad_kernel, place_kernel, rank_kernel, scan_kernel
from shardwright.kernels.permute.whole_triton import whole_place_kernel


@dataclass(frozen=True)
class Routing:
    """Where each (token, slot) entry's row lies among rows sorted by expert."""

    counts: Tensor
    """int32 ``[E]``: rows of each expert, its padding included."""
    entry: Tensor
    """int32 ``[R]``: the entry ``token · K + slot`` of each row. Without padding only the first ``sum(counts)`` are
    set; with padding all are, and rows of no entry hold -1."""
    place: Tensor
    """int32 ``[T, K]``: the row of each entry, -1 where it is not routed."""
    tiles: Tiles
    routed: Tensor
    """int32 ``[E]``: entries of each expert; ``counts`` itself where nothing is padded."""

    @property
    def rows(self) -> int:
        """R, which bounds ``sum(counts)`` on the host."""
        return self.entry.shape[0]


@dataclass(frozen=True)
class _Parts:
    """What the launches of one routing share."""

    ids: Tensor
    rank: Tensor
    histogram: Tensor
    counts: Tensor
    entry: Tensor
    place: Tensor
    experts: int
    token: object | None

    @property
    def chunks(self) -> int:
        return self.histogram.shape[0]

    @property
    def bins(self) -> int:
        return self.histogram.shape[1]

    def start(
        self, role: str, kernel: Any, programs: int, tensors: tuple[Tensor, ...], *sizes: int, **fixed: int
    ) -> None:
        """One launch: every tensor is an argument, in order."""
        key = key_of(self.token, role)
        if not again(key, tensors):
            with device.current(self.ids):
                start(key, tensors, kernel, (programs,), *tensors, *sizes, self.experts, **fixed)


def launch_route(ids: Tensor, experts: int, token: object | None, multiple: int = 1) -> Routing:
    """The routing of ids that passed the guards; ``token`` stands for their layout, the experts and ``multiple``."""
    N = ids.numel()
    index: dict[str, Any] = {"dtype": torch.int32, "device": ids.device}
    place = torch.empty(ids.shape, **index)
    rows = configs.padded_rows(N, experts, multiple)
    entry = torch.empty(rows, **index) if multiple == 1 else torch.full((rows,), -1, **index)
    if N == 0:
        counts = torch.zeros(experts, **index)
        return Routing(counts, entry, place, make_tiles(counts, 0, token), counts)
    chunks, bins = -(-N // configs.CHUNK), configs.power_of_two(experts + 1)
    counts, rank = torch.empty(experts, **index), torch.empty(N, **index)
    parts = _Parts(ids, rank, torch.empty((chunks, bins), **index), counts, entry, place, experts, token)
    parts.start(
        "rank",
        rank_kernel,
        chunks,
        (ids, rank, parts.histogram),
        N,
        LOG=configs.CHUNK.bit_length() - 1,
        BINS=bins,
        num_warps=configs.RANK_WARPS,
    )
    if multiple == 1 and configs.metadata(N, experts).whole:
        return Routing(counts, entry, place, _place_at_once(parts), counts)
    return _place_in_steps(parts, multiple)


def _place_at_once(parts: _Parts) -> Tiles:
    """Scan, tiles and places in one launch."""
    tiles = empty_tiles(parts.entry.shape[0], parts.experts, parts.ids.device)
    tensors = (parts.ids, parts.rank, parts.histogram, parts.counts, tiles.offsets, *tiles.lists(), tiles.count)
    parts.start(
        "whole-place",
        whole_place_kernel,
        parts.chunks,
        (*tensors, parts.entry, parts.place),
        parts.ids.numel(),
        parts.chunks,
        TILE=configs.TILE_ROWS,
        STEP=configs.tile_step(configs.TILE_ROWS),
        CHUNK=configs.CHUNK,
        BINS=parts.bins,
        ROWS=configs.whole_rows(parts.bins),
        num_warps=configs.WHOLE_WARPS,
    )
    return tiles


def _place_in_steps(parts: _Parts, multiple: int) -> Routing:
    """Sums over chunks, then (where rows are padded) whole multiples, then tiles, then places."""
    counts = routed = parts.counts
    parts.start(
        "scan",
        scan_kernel,
        parts.bins // configs.SCAN_EXPERTS,
        (parts.histogram, routed),
        parts.chunks,
        BINS=parts.bins,
        ROWS=configs.SCAN_CHUNKS,
        COLUMNS=configs.SCAN_EXPERTS,
        num_warps=configs.WARPS,
    )
    if multiple > 1:
        counts = torch.empty_like(routed)
        blocks = -(-parts.experts // configs.PAD_EXPERTS)
        parts.start(
            "pad", pad_kernel, blocks, (routed, counts), MULTIPLE=multiple, BLOCK=configs.PAD_EXPERTS,
            num_warps=configs.WARPS,
        )  # fmt: skip
    tiles = make_tiles(counts, parts.entry.shape[0], parts.token)
    parts.start(
        "place",
        place_kernel,
        parts.chunks,
        (parts.ids, parts.rank, parts.histogram, tiles.offsets, parts.entry, parts.place),
        parts.ids.numel(),
        CHUNK=configs.CHUNK,
        BINS=parts.bins,
        num_warps=configs.WARPS,
    )
    return Routing(counts, parts.entry, parts.place, tiles, routed)
