"""The measuring script: cases name points, and a miniature is measured through the runtime's own parts."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
shapes = importlib.import_module("points_shapes")
cost_points = importlib.import_module("cost_points")
points_model = importlib.import_module("points_model")


def test_every_point_is_named_by_its_case() -> None:
    found = shapes.points()
    assert len(found) >= 24
    assert [shapes.read_case(point.case) for point in found] == found
    assert len({point.case for point in found}) == len(found)
    assert {point.how for point in found} == {"none", "full"}
    assert {point.targets for point in found} >= {("attention",), ("experts",), ("attention", "experts")}
    tokens = {point.tokens for point in found}
    assert min(tokens) == 2048 and max(tokens) == 32768
    assert shapes.read_case("qwen3-30b/attention/t1/b1/full") is None


def test_points_of_one_model_stand_together() -> None:
    order = [point.built for point in shapes.points()]
    assert sum(a != b for a, b in itertools.pairwise(order)) == len(set(order)) - 1


def test_a_miniature_is_measured() -> None:
    chosen = [point for point in shapes.tiny_points() if point.model == "qwen3-30b"][2:]
    lines = list(cost_points.run(chosen, torch.float32, 60.0, 60.0))
    assert [line.case for line in lines] == [point.case for point in chosen]
    assert all(line.metrics["step_ms"] > 0 and line.metrics["hottest_expert"] >= 1 for line in lines)
    late = list(cost_points.run(chosen, torch.float32, -1.0, 60.0))
    assert late == [], "no point begins after the limit"


def test_the_described_model_is_the_measured_one() -> None:
    """Parameters that the profile counts from headers are those of the model that is stepped."""
    point = next(p for p in shapes.tiny_points() if p.model == "kimi-linear-48b" and len(p.targets) == 2)
    what = points_model.described(point)
    live = points_model.live_model(point, torch.float32)
    counted = sum(v.numel() for n, v in live.model.named_parameters() if "lora_" not in n)
    assert what.profile.parameters.total == pytest.approx(counted, rel=2e-3)
    adapters = sum(v.numel() for n, v in live.model.named_parameters() if "lora_" in n)
    assert sum(target.adapter_parameters for target in what.targets) == adapters
