"""Launch configurations of the router. Data, for one H200; no torch.

Legend: T tokens, E experts, G groups, k chosen experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.kernels import tuned


@dataclass(frozen=True)
class RowLaunch:
    """Programs that walk over rows. One warp a row: every comparison stays inside a warp, without a barrier."""

    warps: int
    programs_per_sm: int

    def programs(self, T: int, multiprocessors: int) -> int:
        """Programs of a pass over T rows; at least 1."""
        return max(1, min(T, self.programs_per_sm * multiprocessors))


DEFAULT = RowLaunch(warps=1, programs_per_sm=16)
MEAN_BLOCK_P, MEAN_BLOCK_E, MEAN_WARPS = 256, 16, 8


def forward(T: int, E: int, k: int) -> RowLaunch:
    """Launch of scores, choice, weights and statistics."""
    return tuned.lookup("router", "router_fwd", tuned.bucket(T=T, E=E, k=k), DEFAULT)


def backward(T: int, E: int, k: int) -> RowLaunch:
    """Launch of the gradient of the logits."""
    return tuned.lookup("router", "router_bwd", tuned.bucket(T=T, E=E, k=k), DEFAULT)


def tile(E: int, groups: int) -> tuple[int, int]:
    """Shape of the tile that holds a row's experts: groups and members, powers of two."""
    return 1 << (groups - 1).bit_length(), 1 << (E // groups - 1).bit_length()


def slots(k: int) -> int:
    """Places for the chosen experts: a power of two."""
    return 1 << (k - 1).bit_length()
