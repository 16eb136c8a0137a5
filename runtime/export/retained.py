"""How much of an adapter's effect is left after its weights are rounded to the base's number format.

A base that is already quantised lies on the format's grid; a change smaller than half a step then rounds away whole.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

LOW = 0.9
"""Below this share of a weight's change the export warns: serve the adapter beside the base instead."""


@dataclass
class Retained:
    """Sums over slices, by weight: ``<Q(W + D) - Q(W), D>`` and ``<D, D>``."""

    kept: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    whole: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, before: Tensor, after: Tensor, change: Tensor) -> None:
        """Count one slice of a weight."""
        wide = change.double()
        self.kept[name] += float(((after.double() - before.double()) * wide).sum())
        self.whole[name] += float(wide.square().sum())

    def share(self, name: str) -> float:
        """Of one weight; 1 where there was no change."""
        return max(0.0, self.kept[name] / self.whole[name]) if self.whole[name] else 1.0

    @property
    def smallest(self) -> float:
        """The worst weight's share."""
        return min((self.share(name) for name in self.whole), default=1.0)

    def warnings(self) -> tuple[str, ...]:
        """A line for each weight below :data:`LOW`."""
        return tuple(
            f"{name}: {self.share(name):.0%} of the adapter's change is left after rounding"
            for name in sorted(self.whole)
            if self.share(name) < LOW
        )
