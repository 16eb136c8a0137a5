"""Tile sizes of permute and combine. Data, chosen on one H200; no torch.

Legend: T tokens, K experts a token, E experts, R rows, H hidden.
"""

from __future__ import annotations

CHUNK = 512
"""Entries whose ranks one program counts."""
COMPARE = 32
"""Entries that are compared with a whole chunk at a time."""
RANK_WARPS = 8
SCAN_CHUNKS, SCAN_EXPERTS = 64, 16
"""Tile of the scan over chunks."""
TILE_ROWS = 192
"""Most rows of one expert in one tile of the grouped products."""
MAX_EXPERTS = 4096
"""Counts of all experts are scanned by one program."""
COLUMNS = 2048
"""Widest piece of a row that one step of combine holds."""
WARPS = 4


def power_of_two(n: int) -> int:
    """``n`` rounded up to a power of two, at least 16."""
    return max(16, 1 << (n - 1).bit_length()) if n > 0 else 16


def columns(H: int) -> int:
    """Width of one step over a row of H values."""
    return min(power_of_two(H), COLUMNS)


def most_tiles(rows: int, experts: int) -> int:
    """No distribution of ``rows`` rows over ``experts`` experts needs more tiles than this."""
    return rows // TILE_ROWS + min(rows, experts)
