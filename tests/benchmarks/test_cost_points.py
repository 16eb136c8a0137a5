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


def test_a_run_that_is_cut_short_has_seen_every_kind() -> None:
    """The first half of the time: every model, eager and fused, both ways of checkpointing."""
    found = shapes.points()
    early = found[: len(found) * 6 // 10]
    assert {(p.model, p.executor) for p in early} == {(p.model, p.executor) for p in found}
    assert {(p.executor, p.how) for p in early} == {(p.executor, p.how) for p in found}


def test_a_point_that_fails_says_so_and_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [point for point in shapes.tiny_points() if point.model == "qwen3-30b"][:3]
    problems = iter([torch.OutOfMemoryError("too little"), ValueError("odd"), None])
    measured = cost_points.measure

    def measure(*args: object) -> dict[str, float]:
        if (problem := next(problems)) is not None:
            raise problem
        return measured(*args)

    monkeypatch.setattr(cost_points, "measure", measure)
    lines = list(cost_points.run(chosen, torch.float32, 60.0, 60.0, 1))
    assert [set(line.metrics) & {"out_of_memory", "failed", "step_ms"} for line in lines] == [
        {"out_of_memory"}, {"failed"}, {"step_ms"}
    ]  # fmt: skip


def test_what_is_predicted_fused_is_what_the_model_installs() -> None:
    """The modules that the cost model is told of carry a switch in the model that is stepped, and no others."""
    for point in (p for p in shapes.tiny_points(fused=True) if p.executor == "fused"):
        what = points_model.described(point)
        live = points_model.live_model(point, torch.float32)
        switched = {name for name, module in live.model.named_modules() if "forward" in vars(module)}
        assert switched == {name for decision in what.fusions for name in decision.modules}, point.case


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
