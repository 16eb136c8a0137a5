"""Every file or folder of this repository that a page names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w./{},*-]+")
OURS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
PLACEHOLDER = re.compile(r"DEVICE|DATE|step-N")
"""Parts of names that a run or a machine fills in."""


def named(text: str) -> list[str]:
    """Paths in backquotes, braces spelled out, without a test's name."""
    found = []
    for word in CODE.findall(text):
        if "/" not in word or word.split("/")[0] not in OURS or PLACEHOLDER.search(word):
            continue
        if PATH.fullmatch(word := word.partition("::")[0]):
            before, brace, rest = word.partition("{")
            inner, _, after = rest.partition("}")
            found += [f"{before}{one}{after}" for one in inner.split(",")] if brace else [word]
    return found


def missing(text: str) -> list[str]:
    return [path for path in named(text) if not any(ROOT.glob(path.rstrip("/")))]


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]), ids=lambda page: page.name
)
def test_paths_of(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


def test_a_path_that_is_gone_is_found() -> None:
    text = "`schemas/plan.py` `schemas/{plan,gone}.py` `kernels/*/cost.py` `docs/no/` `tests/a.py::test_b` `and/or` `x`"
    assert missing(text) == ["schemas/gone.py", "docs/no/", "tests/a.py"]
