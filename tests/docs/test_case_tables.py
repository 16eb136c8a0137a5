"""Tables that map a fault reported elsewhere to a test of ours name tests that exist, and leave no case out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    "runtime.md": "D1 D3 D4 D5 D7 D9 D10 D11 D12 D13 D15 D16 D18 D20 D21 D22 E1 E2 E3 E4 E5 E7 E8 E9 E10",
    "runs.md": "F1 F2 F4 F5 F6 F7 F9 F10 G1 G2 G3 G5 G7 G8 H1 H3 H4 H5",
    "kernels.md": "B2 B3 B4 B5 B7 B8 B9 B11 B13 B14 B15 C2 C3 C4 C6 C7 C9 C10 C11 C12 C13 C15 C16 C17 "
    "D1 D2 D3 D5 D6 D8 D9 D10 D12 E1 E2 E3 E4",
    "kernels-kda.md": "A1 A2 A4 A6 A7 A8 A9 A10 A11 A12 A13 A15 A17",
    "kernels-dsa.md": "B2 B3 B4 B5 B7 B8 B9 B11 B13 B14 B15",
}
"""Page → the cases that it answers for: adaptation (runtime, runs) and kernels, each by the reports' own numbers."""

FILES: dict[str, list[str]] = {}
for _path in sorted((ROOT / "tests").rglob("*.py")):
    FILES.setdefault(_path.name, []).append(_path.read_text(encoding="utf-8"))


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|") and not line.startswith(("|-", "| -"))]


def cases(row: str) -> set[str]:
    """The cases of a row; ``E1–E5`` stands for all between."""
    found = set(re.findall(r"\b([A-H]\d{1,2})\b", row))
    for letter, first, last in re.findall(r"\b([A-H])(\d{1,2})–[A-H](\d{1,2})\b", row):
        found |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
    return found


def missing(row: str) -> list[str]:
    """Names of a row that no test file has; a name may end in ``…``, and ``::name`` belongs to the file before it."""
    texts: list[str] = []
    gone = []
    for file, name, cut in re.findall(r"`(?:(?:[\w/]*/)?(\w+\.py))?(?:::(\w+))?(…?)`", row):
        if file:
            texts = FILES.get(file, [])
            if not texts:
                gone.append(file)
        wanted = rf"\bdef {name}" if cut else rf"\bdef {name}\b"
        if name and not any(re.search(wanted, text) for text in texts):
            gone.append(name)
    return gone


@pytest.mark.parametrize("page", PAGES)
def test_every_case_has_a_row_and_every_row_a_test(page: str) -> None:
    found = [row for row in rows((ROOT / "docs" / page).read_text(encoding="utf-8")) if cases(row)]
    told = set().union(*map(cases, found))
    assert set(PAGES[page].split()) - told == set()
    assert [gone for row in found for gone in missing(row)] == []


def test_a_lost_test_and_a_lost_case_are_found() -> None:
    row = "| E1–E3, G7 | `test_links.py::test_links…`, `::test_a_dead`, `test_gone.py`, `::test_every_picture…` |"
    assert cases(row) == {"E1", "E2", "E3", "G7"}
    assert missing(row) == ["test_a_dead", "test_gone.py", "test_every_picture"]
