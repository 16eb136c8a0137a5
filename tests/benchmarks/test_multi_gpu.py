"""Parts of the script for several devices that need none: timelines, correlation, summaries, settings."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
multi_gpu = importlib.import_module("multi_gpu")
cases = importlib.import_module("multi_gpu_cases")
timeline = importlib.import_module("multi_gpu_timeline")


def event(name: str, start: float, end: float, device: str = "DeviceType.CUDA") -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


def test_exposed_exchanges_are_those_beside_no_kernel() -> None:
    events = [
        event("ncclDevKernel_SendRecv", 0, 100),
        event("ncclDevKernel_SendRecv", 50, 150),
        event("gemm", 100, 130),
        event("gemm", 120, 140),
        event("ncclDevKernel_AllGather", 0, 150),
        event("aten::mm", 0, 150, "DeviceType.CPU"),
    ]
    whole, exposed = timeline.exposed_share(events, "cuda")
    assert whole == pytest.approx(0.150) and exposed == pytest.approx(0.110)
    assert timeline.exposed_share(events[2:4], "cuda") == (0, 0)


def test_rank_correlation() -> None:
    assert multi_gpu.rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert multi_gpu.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert multi_gpu.rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert multi_gpu.rank_correlation([1, 2], [5, 5]) == 0


@pytest.mark.parametrize("world", [2, 4, 8])
def test_settings_are_few_and_fill_the_world(world: int) -> None:
    found = cases.step_settings(world, ("qwen3-30b", "kimi-linear-48b"), False)
    for model in ("qwen3-30b", "kimi-linear-48b"):
        own = [one for one in found if one.model == model]
        assert 2 < len(own) <= 6
        assert {one.strategy.mesh.world_size for one in own} == {world}
    assert len({one.case for one in found}) == len(found)
    assert all(mesh.world_size == world for mesh in cases.meshes(world))


def test_measured_steps_meet_their_predictions() -> None:
    """Lines of two settings; measured numbers made from the predictions give a full correlation."""
    settings = cases.step_settings(2, ("qwen3-30b",), False)[:2]
    raw = []
    for one in settings:
        predicted = multi_gpu.predict(one.case, 2, None)
        measured = {
            "step_ms": 2 * predicted["predicted_step_ms"],
            "tokens_per_s": predicted["predicted_tokens_per_s"] / 2,
            "peak_bytes": predicted["predicted_peak_bytes"] / 1.02,
        }
        raw.append({"kind": "steps", "case": one.case, "metrics": measured})
    lines = {line["case"]: line["metrics"] for line in multi_gpu.lines_of(raw, 2, None, "multi-gpu")}
    assert lines["multi-gpu-2/memory"]["worst_abs_pct"] == pytest.approx(2, abs=0.01)
    assert lines["multi-gpu-2/time"]["mean_abs_pct"] == pytest.approx(50, abs=0.01)
    assert lines["multi-gpu-2/rank-correlation"] == {"value": 1.0, "points": 2.0, "choice_is_best": 1.0}


def test_a_wrong_gradient_is_named() -> None:
    raw = [{"kind": "parity", "case": "ep2/mixtral-float32-eager", "metrics": {"gradient_error": 1e-2}}]
    (line,) = multi_gpu.lines_of(raw, 2, None, "multi-gpu")
    assert line["metrics"]["passed"] == 0.0
