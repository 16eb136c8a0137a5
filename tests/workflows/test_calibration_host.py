"""How calibration times what a host does: the clock runs for the work alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardwright.workflows import calibration_host


class Clock:
    """Seconds that only what is told to spends."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(calibration_host, "time", found)
    return found


def test_a_backward_is_timed_without_the_forward_that_it_needs(clock: Clock) -> None:
    """Each run gets what was made for it; the device is waited for before the clock starts and before it stops."""
    made, done, waits = [], [], []

    def forward() -> int:
        clock.now += 26.0
        made.append(len(made))
        return made[-1]

    def backward(graph: int) -> None:
        clock.now += 3.0 if graph < 8 else 5.0
        done.append(graph)

    torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: waits.append(clock.now)))
    assert calibration_host._median(backward, torch, forward) == 3.0
    assert made == done == list(range(calibration_host.REPEATS + 3)) and len(waits) == 2 * len(made)
    assert waits[0] == 26.0 and waits[1] == 29.0


def test_warm_up_does_not_count(clock: Clock) -> None:
    runs = []

    def work() -> None:
        runs.append(1)
        clock.now += 100.0 if len(runs) <= 3 else 2.0

    torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: None))
    assert calibration_host._median(work, torch) == 2.0
