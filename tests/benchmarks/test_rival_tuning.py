"""Which candidate a rival takes where only its values matter."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.autotuner import Autotuner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from rival_tuning import first_that_runs

ON_DISK: list[str] = []
SECONDS = {"does not compile": math.inf, "slow": 2.0, "fast": 1.0}


class Tuner:
    """Rounds of an autotuner whose results are kept on disk: prune, then time every candidate."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.best = ""

    def round(self) -> str:
        candidates: Any = Autotuner.prune_configs(self, {})  # type: ignore[arg-type]

        def choose() -> None:
            times: dict[str, Any] = {name: Autotuner._bench(self, config=name) for name in candidates}  # type: ignore
            self.best = min(times, key=lambda name: times[name])

        Autotuner.check_disk_cache(self, ("key",), candidates, choose)  # type: ignore[arg-type]
        return self.best


@pytest.fixture(autouse=True)
def candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    def bench(self: Tuner, *args: Any, config: str, **meta: Any) -> list[float]:
        self.ran.append(config)
        return [SECONDS[config]] * 3

    def disk(self: Tuner, key: Any, found: Any, choose: Any) -> bool:
        choose()
        ON_DISK.append(self.best)
        return False

    ON_DISK.clear()
    monkeypatch.setattr(Autotuner, "check_disk_cache", disk)
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: list(SECONDS))
    monkeypatch.setattr(Autotuner, "_bench", bench)


def test_the_first_that_runs_is_taken_in_every_round_and_no_other_is_tried() -> None:
    tuner, other = Tuner(), Tuner()
    with first_that_runs():
        assert [tuner.round(), other.round(), tuner.round()] == ["slow"] * 3
    assert tuner.ran == ["does not compile", "slow"] * 2
    assert ON_DISK == []


def test_outside_the_block_the_fastest_is_taken() -> None:
    tuner = Tuner()
    with first_that_runs():
        pass
    assert tuner.round() == "fast"
    assert tuner.ran == list(SECONDS)
    assert ON_DISK == ["fast"]
