"""docs/k3-plans.md is what benchmarks/k3_plans.py writes: every row of named plans; searched rows in the slow test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import k3_plans

AGAIN = "python benchmarks/k3_plans.py --write makes the page anew"


@pytest.fixture(scope="module")
def page() -> list[str]:
    return k3_plans.PAGE.read_text().split("\n")


def test_named_plans_stand_in_the_page(page: list[str]) -> None:
    for name in k3_plans.CLUSTERS:
        for row in (*k3_plans.short_rows(name), k3_plans.long_row(name), k3_plans.long_row(name, k3_plans.CP)):
            assert row in page, AGAIN
    degrees = [k3_plans.long_row(k3_plans.DEGREES_ON, cp) for cp in k3_plans.DEGREES]
    assert all(row in page for row in (*degrees, k3_plans.exchanged())), AGAIN
    tables = [line for line in page if line.startswith("| ") and not line.startswith(("| Devices", "| ---"))]
    assert len(tables) == 5 * len(k3_plans.CLUSTERS) + len(k3_plans.DEGREES)


def test_what_no_gpu_runs_is_marked(page: list[str]) -> None:
    rows = [line for line in page if line.startswith(("| ascend-910b-8", "| cloudmatrix-384"))]
    assert len(rows) == 10 and all("no: " in row and "device type npu" in row for row in rows)
    long = page[page.index("## One million tokens of context") :]
    tensor = [row for row in long if "·tp" in row]
    assert len(tensor) == len(k3_plans.CLUSTERS) and all("| no: tp = " in row for row in tensor)
    cut = [row for row in long if "·cp" in row]
    assert len(cut) == len(k3_plans.CLUSTERS) + len(k3_plans.DEGREES)
    assert all("| yes |" in row or "| no: device type npu |" in row for row in cut)
    assert any("·cp128" in row and ", fits |" in row for row in long), "a million tokens fit by context parallelism"
    assert sum(row.endswith("| yes |") for row in page) == 27 + 9 + len(k3_plans.DEGREES), "nine GPU clusters"


@pytest.mark.slow
def test_searched_plans_stand_in_the_page(page: list[str]) -> None:
    for name in ("h200-128", "gb200-nvl72"):
        assert k3_plans.row(name, k3_plans.searched(name)) in page, AGAIN
