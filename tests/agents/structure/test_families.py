"""The recorded run over all families: its bars, its page, and a sample run again."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "benchmarks"
SAMPLE = ("aria", "granitemoe", "dbrx", "doge")
"""Transposed stacks; a prefix, stacks and multipliers of its own; a loop over one matrix; neurons in tables."""
REACHED = {
    "profiled exactly": 80,
    "captured": 76,
    "captured, with experts block, norms and activation found": 76,
    "experts block proved": 70,
}
"""What the record shows; a later record may not show less."""
STABLE = ("family", "class", "parameters", "profile", "capture", "experts", "failed_differential")


def load(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((BENCH / "families.json").read_text())
    return result


def test_the_page_is_of_the_recorded_run(recorded: dict[str, Any]) -> None:
    assert (ROOT / "docs" / "families.md").read_text() == load("families_page").render(recorded)


def test_the_bars_do_not_sink(recorded: dict[str, Any]) -> None:
    bars = load("families_page").bars(list(recorded["rows"].values()))
    assert {name: bars[name] for name in REACHED if bars[name] < REACHED[name]} == {}


def test_every_captured_family_has_its_experts_norms_and_activation_found(recorded: dict[str, Any]) -> None:
    captured = {name: row for name, row in recorded["rows"].items() if row["capture"] == "yes"}
    assert {n for n, r in captured.items() if r["experts"] == "no" or not r["norms"] or not r["activations"]} == set()


def test_no_match_fails_the_differential_test(recorded: dict[str, Any]) -> None:
    assert [name for name, row in recorded["rows"].items() if row.get("failed_differential")] == []


def test_recorded_families_are_those_of_this_transformers(recorded: dict[str, Any]) -> None:
    import transformers

    if transformers.__version__ != recorded["transformers"]:
        pytest.skip("the record is of another transformers")
    assert set(recorded["rows"]) <= {*load("families_tiny").moe_families(), *load("families_own").OWN}


@pytest.mark.parametrize("family", SAMPLE)
def test_a_sample_gives_its_recorded_row(family: str, recorded: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    if transformers.__version__ != recorded["transformers"]:
        pytest.skip("the record is of another transformers")
    load("families_tiny")
    row = load("families_row").row_of(family, tmp_path)
    assert {key: row.get(key) for key in STABLE} == {key: recorded["rows"][family].get(key) for key in STABLE}
