"""Tiles of the grouped products, by value size and rows an expert. Data, chosen on one H200; no torch.

Legend: R rows, E experts, H hidden, I expert width, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.kernels import tuned

OP = "grouped_lora_mlp"


@dataclass(frozen=True)
class Way:
    """Which kernel makes the products of a layer."""

    hopper: bool


@dataclass(frozen=True)
class Tile:
    """One product's launch: ``BN`` weight columns, ``BK`` depth of a step, ``group`` row tiles a weight tile."""

    BN: int
    BK: int
    group: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Strip:
    """One launch that streams rows: rows and columns of a step."""

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class AdapterGrads:
    """Whether both factors of an adapter get their gradients in one launch."""

    paired: bool


@dataclass(frozen=True)
class StackTile:
    """The launch of a stack's gradient: rows of a step, and a program's part of the stack."""

    BR: int
    BN: int
    BM: int
    warps: int
    stages: int


MANY_ROWS = 1024
"""From so many rows an expert on, row tiles of one expert fill the device: they share weight tiles in groups."""

WIDE_VALUES = Tile(BN=32, BK=32, group=1, warps=4, stages=2)
"""fp32 runs without the matrix units' 16-bit path; it is there for checking, not for speed."""


def product(value_bytes: int, rows: int, experts: int) -> Tile:
    """One weight tile a step."""
    if value_bytes == 4:
        return WIDE_VALUES
    default = Tile(BN=256, BK=64, group=group(rows, experts), warps=8, stages=3)
    return tuned.lookup(OP, "product", tuned.bucket(R=rows, E=experts), default)


def group(rows: int, experts: int) -> int:
    """Row tiles that share a weight tile before the next column.

    One H200, bf16, 14 experts of 4,681 rows, 3584 and 3072: the four products take 13.36 ms by fours, 13.35 by sixes,
    13.41 by twos and 13.51 by eights.
    """
    return 4 if rows >= MANY_ROWS * experts else 1


HOPPER_ROWS = 138
"""From so many rows an expert on, the Hopper product is the faster one: three consumers of 64 rows share a tile, of
which the last 32 cost half. One H200, bf16: against the portable product its four take 24.3 and 25.2 ms at 256 rows an
expert (256 experts of 7168 and 2048, rank 16, forward and backward). Fewer rows leave a consumer without work."""


def prefers_hopper(rows: int, experts: int) -> bool:
    """Whether evenly routed rows keep the Hopper product's consumers at work."""
    return rows >= HOPPER_ROWS * max(experts, 1)


def way(rows: int, experts: int) -> Way:
    """The kernel of the products, for ``rows`` rows in all."""
    default = Way(prefers_hopper(rows, experts))
    return tuned.lookup(OP, "way", tuned.bucket(R=rows, E=experts), default)


ACTIVATION = Strip(rows=8, columns=256, warps=4, stages=3)
ADAPTER_GRAD = Strip(rows=32, columns=256, warps=4, stages=4)
CHAIN = 64
"""Terms of one fp32 sum; such sums are then added. One chain over 714 rows or 1,024 columns erred 1.15e-6 where the
vendor's library erred 0.48e-6 (one H200)."""


def inner_steps(value_bytes: int, step: int) -> int:
    """Steps of an inner sum in fp32, at least two, so that it stays a loop; 0 in 16-bit types: one sum over all,
    where the result's own rounding is far larger."""
    return max(2, CHAIN // step) if value_bytes == 4 else 0


def adapter_grads(rows: int, experts: int) -> AdapterGrads:
    """Launches of an adapter's gradients. Not timed on a device: one is never more work than two."""
    return tuned.lookup(OP, "adapter_grads", tuned.bucket(R=rows, E=experts), AdapterGrads(paired=True))


def stack_grad(value_bytes: int, rows: int, experts: int) -> StackTile:
    """Launch of a stack's gradient. Not timed on a device."""
    if value_bytes == 4:
        return StackTile(BR=32, BN=32, BM=32, warps=4, stages=2)
    default = StackTile(BR=64, BN=128, BM=128, warps=8, stages=3)
    return tuned.lookup(OP, "stack_grad", tuned.bucket(R=rows, E=experts), default)


FEW_ROWS = 384
"""Below so many rows an expert, gathered rows shrink faster in strips of 32."""


def shrink(rows: int, experts: int, gathered: bool) -> Strip:
    """The low-rank product of rows."""
    few = gathered and rows < FEW_ROWS * experts
    return Strip(rows=32 if few else 64, columns=128, warps=4, stages=4)


ZERO_WORDS, ZERO_WARPS = 512, 4


def rank_columns(rank: int) -> int:
    """The rank as the matrix units take it: a power of two, at least 16."""
    return max(16, 1 << (rank - 1).bit_length())
