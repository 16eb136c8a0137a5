"""Which functions a timed pass leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.kernels import bench


def fails(error: Exception) -> Any:
    def run(x: Tensor) -> Tensor:
        raise error

    return run


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are the functions themselves; clocks count nothing."""
    monkeypatch.setattr(bench, "timed_pass", lambda suite, case, function, name: lambda: function(torch.ones(2)))
    monkeypatch.setattr(bench, "rounds", lambda runs: dict.fromkeys(runs, 1.0))
    monkeypatch.setattr(bench, "device_ms", lambda run: 0.5)
    monkeypatch.setattr(bench, "peak_bytes", lambda run: 7)


def bench_pass(functions: dict[str, Any]) -> Any:
    anything: Any = None
    return bench.bench_pass(anything, anything, "fwd", functions)


def test_a_rival_that_does_not_run_is_named_and_left_out(timed: None) -> None:
    functions = {
        "ours": torch.relu,
        "large": fails(torch.OutOfMemoryError("no room")),
        "fla": fails(RuntimeError("produces incorrect results")),
        "eager": torch.relu,
    }
    times, busy, peak, refused = bench_pass(functions)
    assert refused == {"large_out_of_memory": 1.0, "fla_refused": 1.0}
    assert set(times) == set(busy) == {"ours", "eager"} and peak == 7


@pytest.mark.parametrize("error", [RuntimeError("wrong"), torch.OutOfMemoryError("no room")])
def test_ours_is_never_left_out(timed: None, error: Exception) -> None:
    with pytest.raises(type(error)):
        bench_pass({"ours": fails(error), "eager": torch.relu})


def test_a_mistake_in_the_call_is_no_refusal(timed: None) -> None:
    with pytest.raises(TypeError):
        bench_pass({"ours": torch.relu, "fla": lambda: None})
