"""Launch configurations of the short convolution. Data; no torch. Not timed yet."""

from __future__ import annotations

from shardwright.kernels.kda.configs import Tile

PIECE = 64
"""Tokens of a piece."""


def forward(stated: bool) -> Tile:
    """``BK`` are channels; inputs before a document take registers."""
    return Tile(BK=32 if stated else 64, BV=0, warps=4, stages=1)


def backward(stated: bool) -> Tile:
    return Tile(BK=16 if stated else 32, BV=0, warps=4, stages=1)
