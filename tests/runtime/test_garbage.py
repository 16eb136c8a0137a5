"""Collections happen between steps and only there."""

from __future__ import annotations

import gc
import weakref

from shardwright.runtime.garbage import collected_between_steps


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.me = self


def cycle() -> weakref.ref[Node]:
    return weakref.ref(Node())


def test_a_cycle_lives_until_the_step_that_collects() -> None:
    with collected_between_steps(every=2) as garbage:
        made = cycle()
        for _ in range(3000):
            cycle()
        assert made() is not None and not gc.isenabled()
        garbage.step()
        assert made() is not None
        garbage.step()
        assert made() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_what_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collected_between_steps():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
