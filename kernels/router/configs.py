"""Launch configurations of the router. Data, for one H200; no torch.

Legend: T tokens, E experts, G groups, k chosen experts.
"""

from __future__ import annotations

WARPS = 1
"""One warp a row: every comparison of a row's experts stays inside a warp, without a barrier."""

PROGRAMS_PER_SM = 16
MEAN_BLOCK_P, MEAN_BLOCK_E, MEAN_WARPS = 256, 16, 8


def tile(E: int, groups: int) -> tuple[int, int]:
    """Shape of the tile that holds a row's experts: groups and members, powers of two."""
    return 1 << (groups - 1).bit_length(), 1 << (E // groups - 1).bit_length()


def slots(k: int) -> int:
    """Places for the chosen experts: a power of two."""
    return 1 << (k - 1).bit_length()


def programs(T: int, multiprocessors: int) -> int:
    """Programs of a pass over T rows; at least 1."""
    return max(1, min(T, PROGRAMS_PER_SM * multiprocessors))
