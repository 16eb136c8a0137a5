"""Tile sizes of permute and combine. Data, chosen on one H200; no torch.

Legend: T tokens, K experts a token, E experts, R rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.kernels import tuned

OP = "permute"


@dataclass(frozen=True)
class Metadata:
    """How places are found once ranks are: in one launch, or in three."""

    whole: bool


CHUNK = 512
"""Entries whose ranks one program counts: a power of two."""
RANK_WARPS = 8
SCAN_CHUNKS, SCAN_EXPERTS = 64, 16
"""Tile of the scan over chunks."""
TILE_ROWS = 192
"""Most rows of one expert in one tile of the grouped products."""
TILE_STEP = 64
"""Rows that a product's matrix step takes at once."""
PAD_EXPERTS = 256
"""Experts whose rows one program rounds up to whole multiples."""
WHOLE_READS = 1 << 22
"""Histogram entries that all programs of the one launch read together; from more on, three launches read less.
8,192 tokens with 8 of 128 experts make it 4.2 million, 16 of 896 experts 67 million."""
WHOLE_TILE, WHOLE_WARPS = 4096, 8
"""Histogram entries that a program of the one launch holds at a time."""
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


def most_tiles(rows: int, experts: int, tile_rows: int = TILE_ROWS) -> int:
    """No distribution of ``rows`` rows over ``experts`` experts needs more tiles than this."""
    return rows // tile_rows + min(rows, experts)


def tile_step(tile_rows: int) -> int:
    """Rows of which a tile holds whole numbers: ``TILE_STEP``, or the largest power of two in smaller tiles."""
    return min(TILE_STEP, tile_rows & -tile_rows)


def padded_rows(entries: int, experts: int, multiple: int) -> int:
    """No routing of ``entries`` entries has more rows than this, each expert's rounded up to whole multiples."""
    return entries + min(entries, experts) * (multiple - 1)


def reads_little(entries: int, experts: int) -> bool:
    """Whether what all programs of the one launch read again is small."""
    chunks = -(-entries // CHUNK)
    return chunks * chunks * power_of_two(experts + 1) <= WHOLE_READS


def metadata(entries: int, experts: int) -> Metadata:
    """Launches after the ranks. Not timed on a device: fewer launches where what they read again is small."""
    default = Metadata(whole=reads_little(entries, experts))
    return tuned.lookup(OP, "metadata", tuned.bucket(T=entries, E=experts), default)


def metadata_launches(entries: int, experts: int) -> int:
    """Launches of a routing's metadata by default, ranks included."""
    return 2 if reads_little(entries, experts) else 4


def whole_rows(bins: int) -> int:
    """Chunks that a program of the one launch adds at a time."""
    return max(1, WHOLE_TILE // bins)


def slots(K: int) -> int:
    """A token's slots as a tile: a power of two."""
    return 1 << (K - 1).bit_length()
