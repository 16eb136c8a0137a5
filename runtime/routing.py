"""What routing chose in one run, for another run of the same rows.

A layer under a checkpoint runs twice: the first pass adds its choices in order, the second takes them as they were
(:class:`Choices`). A check runs a model twice by other arithmetic: rounding alone makes a few tokens of hundreds of
experts change one, so the second run takes the first one's experts and counts where it would have chosen otherwise
(:class:`Routes`).
Legend: T tokens, E scores of a token, K chosen of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

Size = tuple[int, int, int]
"""Rows, scores of a row, chosen of them: what tells a router's choice from an indexer's or a group's."""
Choose = Callable[[], Tensor]


@dataclass
class Routes:
    """Choices of a whole run, by size and in order; a run that repeats them may choose more or less often.

    ``compared`` and ``differing`` count a repeating run's own choices and those that are not among the kept ones.
    """

    made: list[tuple[Size, Tensor]] = field(default_factory=list)
    replay: bool = False
    place: int = 0
    compared: int = 0
    differing: int = 0

    def again(self) -> Routes:
        """The same choices, to be repeated."""
        return Routes(self.made, True)

    @property
    def differing_share(self) -> float:
        return self.differing / max(self.compared, 1)

    def take(self, size: Size, choose: Choose) -> Tensor:
        """This run's choice, kept; or the next kept one of this size, where there is one."""
        own = choose()
        if not self.replay:
            self.made.append((size, own))
            return own.clone()
        for place in range(self.place, len(self.made)):
            if self.made[place][0] == size:
                self.place = place + 1
                kept = self.made[place][1].to(own).reshape(own.shape).clone()
                self.compared += own.numel()
                self.differing += own.numel() - common(own, kept)
                return kept
        return own


@dataclass
class Choices:
    """The indices that one layer's routing chose, and whether this pass makes or repeats them."""

    made: list[Tensor] = field(default_factory=list)
    replay: bool = False
    place: int = 0
    outer: Routes | None = None
    """The run that this layer is a part of, where one is kept or repeated."""

    def again(self) -> Choices:
        """The same choices, to be repeated."""
        return Choices(self.made, True)

    def take(self, size: Size, choose: Choose) -> Tensor:
        """The next choice, in a tensor of its own."""
        if not self.replay:
            self.made.append(choose() if self.outer is None else self.outer.take(size, choose))
        chosen = self.made[self.place].clone()
        self.place += 1
        return chosen


def common(left: Tensor, right: Tensor) -> int:
    """How many entries of ``left`` [..., K] are among those of ``right`` in the same row."""
    known = right.sort(-1).values
    at = torch.searchsorted(known, left.contiguous()).clamp_max(known.shape[-1] - 1)
    return int((known.gather(-1, at) == left).sum())


_active: list[Choices | Routes] = []


@contextmanager
def choosing(choices: Choices | Routes) -> Iterator[None]:
    """Inside the block, routers keep or repeat their choices."""
    _active.append(choices)
    try:
        yield
    finally:
        _active.pop()


def active() -> Choices | Routes | None:
    """The choices of the checkpointed layer or the run that goes on now; ``None`` outside both."""
    return _active[-1] if _active else None
