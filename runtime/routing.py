"""What a checkpointed layer's routing chose in the forward, for its recomputation.

A layer under a checkpoint runs twice. The first pass adds its choices in order; the second takes them as they were.
Legend: T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Choices:
    """The indices that one layer's routing chose, and whether this pass makes or repeats them."""

    made: list[Tensor] = field(default_factory=list)
    replay: bool = False
    place: int = 0

    def again(self) -> Choices:
        """The same choices, to be repeated."""
        return Choices(self.made, True)

    def next(self) -> Tensor:
        """The next choice, in a tensor of its own."""
        chosen = self.made[self.place].clone()
        self.place += 1
        return chosen


_active: list[Choices] = []


@contextmanager
def choosing(choices: Choices) -> Iterator[None]:
    """Inside the block, routers keep or repeat their choices."""
    _active.append(choices)
    try:
        yield
    finally:
        _active.pop()


def active() -> Choices | None:
    """The choices of the checkpointed layer that runs now; ``None`` outside one."""
    return _active[-1] if _active else None
