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
        for row in (*k3_plans.short_rows(name), k3_plans.long_row(name)):
            assert row in page, AGAIN
    assert all(line in page for line in f"{k3_plans.by_context()},".split("\n")), AGAIN
    tables = [line for line in page if line.startswith("| ") and not line.startswith(("| Devices", "| ---"))]
    assert len(tables) == 4 * len(k3_plans.CLUSTERS)


def test_what_no_gpu_runs_is_marked(page: list[str]) -> None:
    rows = [line for line in page if line.startswith(("| ascend-910b-8", "| cloudmatrix-384"))]
    assert len(rows) == 8 and all("no: " in row and "device type npu" in row for row in rows)
    long = page[page.index("## One million tokens of context") :]
    assert all("no: tp = 32" in row for row in long if "tp32" in row)
    assert sum(row.endswith("| yes |") for row in page) == 27, "three executable plans on each of nine GPU clusters"


@pytest.mark.slow
def test_searched_plans_stand_in_the_page(page: list[str]) -> None:
    for name in ("h200-128", "gb200-nvl72"):
        assert k3_plans.row(name, k3_plans.searched(name)) in page, AGAIN
