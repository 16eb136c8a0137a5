"""Result files hold one schema, and the page that shows them is current."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import ValidationError

from shardwright.schemas.bench import BenchLine

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


render, lines = load("render"), load("lines")


def line(**changes: object) -> BenchLine:
    facts: dict[str, object] = {
        "bench": "kernels",
        "case": "rmsnorm/16kx7168",
        "passes": "fwd",
        "ours": 0.2,
        "rival": "torch.compile",
        "rival_value": 0.3,
        "ratio": 1.5,
        "floor": 0.1,
        "peak_bytes": 1 << 20,
        "device": "NVIDIA H200",
        "versions": {"torch": "2.11"},
        "commit": "abc",
        "date": "2026-11-29",
    }
    return BenchLine.model_validate({**facts, **changes})


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")), ids=lambda p: p.name)
def test_every_line_is_a_bench_line(path: Path) -> None:
    found = [BenchLine.model_validate_json(text) for text in path.read_text().splitlines()]
    assert found
    for at in found:
        if at.ours and at.rival_value and at.unit == "ms":
            assert at.ratio == pytest.approx(at.rival_value / at.ours, rel=2e-2)
        if at.ours and at.floor and at.unit == "ms":
            assert at.ours > 0.9 * at.floor, "faster than the floor: the floor or the timing is wrong"


def test_the_page_is_current() -> None:
    assert render.main(["--check"]) == 0, "run: python benchmarks/render.py"


def test_rendering_is_deterministic_and_shows_losses() -> None:
    given = [line(), line(passes="bwd", ours=0.4, ratio=0.75)]
    page = render.render(given)
    assert page == render.render(reversed(given))
    assert "| rmsnorm/16kx7168 | fwd | 0.2 ms | torch.compile | 0.3 ms | 1.50 | 0.1 | 2.00× | 1 MiB |" in page
    assert "| 0.75 |" in page


def test_the_latest_line_stands() -> None:
    page = render.render([line(date="2026-12-01", ours=0.11), line(date="2026-11-30", ours=0.15)])
    assert "0.11 ms" in page and "0.15 ms" not in page


def test_lines_are_filled_and_appended_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_COMMIT", "feedbeef")
    made = lines.line({"bench": "plan", "case": "tiny", "ours": 2.0, "rival": "eager", "rival_value": 5.0})
    assert made.ratio == 2.5 and made.commit == "feedbeef" and made.versions["torch"]
    path = lines.append([made], tmp_path)
    assert lines.append([made], tmp_path) == path
    assert [BenchLine.model_validate_json(t) for t in path.read_text().splitlines()] == [made, made]
    with pytest.raises(ValueError, match="one bench"):
        lines.append([made, line()], tmp_path)
    with pytest.raises(ValidationError):
        lines.line({"bench": "plan", "case": "tiny", "speed": 3})
