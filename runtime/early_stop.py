"""Ending a run whose held-out loss no longer falls."""

from __future__ import annotations

from collections.abc import Iterable


class EarlyStop:
    """Counts evaluations in a row that are not below the best so far; the same on every rank, from the same losses.

    Args:
        patience: how many of them end the run; 0 never does.
        losses: held-out losses before this (re)start, the base model's first.
    """

    def __init__(self, patience: int, losses: Iterable[float] = ()) -> None:
        self.patience, self.best, self.without = patience, float("inf"), 0
        for loss in losses:
            self.after(loss)

    def after(self, loss: float) -> bool:
        """Whether the run ends with this evaluation."""
        if loss < self.best:
            self.best, self.without = loss, 0
        else:
            self.without += 1
        return self.patience > 0 and self.without >= self.patience
