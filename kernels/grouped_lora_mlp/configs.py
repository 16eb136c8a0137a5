"""Tiles of the grouped products, by value size and rows an expert. Data, chosen on one H200; no torch.

Legend: R rows, E experts, H hidden, I expert width, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """One product's launch: ``BN`` weight columns, ``BK`` depth of a step, ``group`` row tiles a weight tile."""

    BN: int
    BK: int
    group: int
    warps: int
    stages: int


MANY_ROWS = 1024
"""From so many rows an expert on, row tiles of one expert fill the device: they share weight tiles in groups."""

WIDE_VALUES = Tile(BN=32, BK=32, group=1, warps=4, stages=2)
"""fp32 runs without the matrix units' 16-bit path; it is there for checking, not for speed."""


def gate_up(value_bytes: int, rows: int, experts: int) -> Tile:
    """Two weight tiles a step: gate and up."""
    if value_bytes == 4:
        return WIDE_VALUES
    return Tile(BN=128, BK=64, group=_group(rows, experts), warps=8, stages=3)


def rows(value_bytes: int, rows: int, experts: int) -> Tile:
    """One weight tile a step; the down product, and dx."""
    if value_bytes == 4:
        return WIDE_VALUES
    return Tile(BN=256, BK=64, group=_group(rows, experts), warps=8, stages=3)


def activation_bwd(value_bytes: int, rows: int, experts: int) -> Tile:
    """One weight tile a step and an epilogue that reads both pre-activations."""
    if value_bytes == 4:
        return WIDE_VALUES
    return Tile(BN=256, BK=64, group=_group(rows, experts), warps=8, stages=3)


def _group(rows: int, experts: int) -> int:
    return 8 if rows >= MANY_ROWS * experts else 1


STRIP_ROWS = 32
"""Rows whose activation gradient one step computes."""

SHRINK_ROWS, SHRINK_COLUMNS, SHRINK_WARPS, SHRINK_STAGES = 64, 128, 4, 4
GRAD_ROWS, GRAD_COLUMNS, GRAD_WARPS, GRAD_STAGES = 64, 128, 4, 4


def rank_columns(rank: int) -> int:
    """The rank as the matrix units take it: a power of two, at least 16."""
    return max(16, 1 << (rank - 1).bit_length())
