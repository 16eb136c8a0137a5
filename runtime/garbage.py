"""When Python looks for cycles: between steps, on every rank at the same one.

A collection that starts by itself stops one rank anywhere in a step, and the others wait for it in the next collective.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY_STEPS = 20
"""Steps between collections of young objects."""


class Garbage:
    """Told of every step's end."""

    def __init__(self, every: int = EVERY_STEPS) -> None:
        self.every, self.steps = every, 0

    def step(self) -> None:
        """Collect young objects every so many steps."""
        self.steps += 1
        if self.steps % self.every == 0:
            gc.collect(1)


@contextmanager
def collected_between_steps(every: int = EVERY_STEPS) -> Iterator[Garbage]:
    """No collection starts by itself inside the block; what lives at its start is not looked at again."""
    before = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield Garbage(every)
    finally:
        gc.unfreeze()
        if before:
            gc.enable()
