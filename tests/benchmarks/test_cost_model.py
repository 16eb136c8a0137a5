"""The cost benchmark reads measured lines and reports shares; without lines it reports nothing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from shardwright.schemas.bench import BenchLine

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
cost_model = importlib.import_module("cost_model")


def line(case: str, **metrics: float) -> BenchLine:
    return BenchLine(
        bench="cost-points", case=case, device="x", versions={}, commit="x", date="2026-01-01", metrics=metrics
    )


def test_no_points_no_metrics(tmp_path: Path) -> None:
    assert cost_model.own_points(tmp_path) == ([], [])
    assert cost_model.own_metrics([]) == {}


def test_shares_follow_from_the_errors(tmp_path: Path) -> None:
    case = "qwen3-30b-2layers/attention/t4096/b1/full/eager"
    (tmp_path / "a.jsonl").write_text(line(case, peak_bytes=1.0).model_dump_json() + "\n")
    ((_, report),), _ = cost_model.own_points(tmp_path)
    peak = report.memory.peak_bytes
    points = [
        (line(case, peak_bytes=peak * factor, step_ms=report.time.step_ms * factor), report) for factor in (1, 1.1)
    ]
    found = cost_model.own_metrics(points)
    assert found["cost/memory"]["share_within_3pct"] == 0.5
    assert found["cost/memory"]["worst_under_pct"] == pytest.approx(100 * (1 - 1 / 1.1), abs=1e-3)
    assert found["cost/time"]["mean_abs_pct"] == pytest.approx(100 * (1 - 1 / 1.1) / 2, abs=1e-3)


def test_a_feasible_point_that_ran_out_of_memory_is_counted(tmp_path: Path) -> None:
    case = "qwen3-30b-2layers/attention/t4096/b1/full/eager"
    (tmp_path / "a.jsonl").write_text(line(case, out_of_memory=1.0).model_dump_json() + "\n")
    ((lost, report),), _ = cost_model.own_points(tmp_path)
    assert report.feasible and cost_model.own_metrics([(lost, report)]) == {}
    whole = line(case, peak_bytes=float(report.memory.peak_bytes))
    found = cost_model.own_metrics([(lost, report), (whole, report)])
    assert found["cost/memory"]["feasible_out_of_memory"] == 1 and found["cost/memory"]["points"] == 1
    assert cost_model.own_rows([(lost, report)]) == ([], [])


def test_unknown_cases_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line("other/attention/t1/b1/full", peak_bytes=1.0).model_dump_json() + "\n")
    assert cost_model.own_points(tmp_path) == ([], ["other/attention/t1/b1/full"])


def test_whole_training_steps_are_points(tmp_path: Path) -> None:
    """Two measured steps of the whole Qwen3-30B-A3B are predicted within 3 % of their peaks."""
    points, unknown = cost_model.own_points()
    whole = [(one, report) for one, report in points if "-48layers/" in one.case]
    assert len(whole) == 2 and unknown == []
    for measured, report in whole:
        assert report.memory.peak_bytes == pytest.approx(measured.metrics["peak_bytes"], rel=0.03)
        assert cost_model.as_point(measured) == measured


def test_peaks_of_the_kernels_as_they_are_are_predicted() -> None:
    """Fused points measured since the experts' backward writes over what it kept: each within 1 %."""
    points, _ = cost_model.own_points()
    found = {one.case: (one, report) for one, report in points if one.commit == "ac53267"}
    assert len(found) >= 6
    for case, (measured, report) in found.items():
        assert report.memory.peak_bytes == pytest.approx(measured.metrics["peak_bytes"], rel=0.01), case


def test_no_plan_called_feasible_runs_out_of_memory() -> None:
    """Of all measured points: what is planned for a rank covers what it needed, and none that fits ran out."""
    points, _ = cost_model.own_points()
    assert points
    assert [one.case for one, report in points if report.feasible and "out_of_memory" in one.metrics] == []
    for measured, report in cost_model.ended(points):
        assert report.memory.reserved_bytes >= measured.metrics["peak_bytes"], measured.case


def test_a_line_is_held_to_the_allocator_that_it_ran_with(tmp_path: Path) -> None:
    """Without the mark of segments that grow, the holes are those of segments of fixed size."""
    case = "qwen3-30b-2layers/attention/t4096/b1/full/eager"
    (tmp_path / "a.jsonl").write_text(line(case, peak_bytes=1.0).model_dump_json() + "\n")
    ((old, report),), _ = cost_model.own_points(tmp_path)
    new = line(case, peak_bytes=1.0, expandable_segments=1.0)
    growing, fixed = cost_model.reserved_bytes(new, report), cost_model.reserved_bytes(old, report)
    assert growing == report.memory.reserved_bytes != fixed
    (holes,) = (one.bytes for one in report.memory.components if one.name == "allocator_holes")
    assert 0.9 * 2 * 4096 * 151936 < holes < 1.2 * 2 * 4096 * 151936
    peak = report.memory.peak_bytes
    lines = [
        line(case, peak_bytes=peak, reserved_bytes=found, context_bytes=0.0, **mark)
        for found, mark in ((fixed, {}), (growing, {"expandable_segments": 1.0}), (1.1 * fixed, {}))
    ]
    found = cost_model.own_metrics([(one, report) for one in lines])
    assert found["cost/memory"]["reserved_share_within_6pct"] == pytest.approx(2 / 3, abs=1e-4)


def test_what_eager_points_reserve_is_predicted() -> None:
    """Points whose segments grew, on one H200: every one within 6 %, eight in ten within 2 %."""
    points, _ = cost_model.own_points()
    errors = []
    for measured, report in cost_model.ended(points):
        have = measured.metrics
        if measured.case.endswith("eager") and have.get("expandable_segments"):
            seen = have["reserved_bytes"] + have["context_bytes"]
            errors.append(abs(cost_model.reserved_bytes(measured, report) / seen - 1))
    assert len(errors) >= 20
    assert max(errors) < 0.06
    assert sum(error < 0.02 for error in errors) >= 0.8 * len(errors)
