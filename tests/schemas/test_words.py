"""Counts as people say them, and no report that says them otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.schemas.words import plural

ROOT = Path(__file__).parents[2]
ROOMS = ("schemas", "checkpoints", "kernels", "search_spaces", "agents", "runtime", "workflows")


@pytest.mark.parametrize(
    ("number", "word", "text"),
    [
        (1, "rank", "1 rank"),
        (0, "rank", "0 ranks"),
        (2000, "sequence", "2,000 sequences"),
        (2, "micro-batch", "2 micro-batches"),
        (3, "launch", "3 launches"),
        (2, "open question", "2 open questions"),
        (2, "process", "2 processes"),
    ],
)
def test_a_count_is_said(number: int, word: str, text: str) -> None:
    assert plural(number, word) == text


def test_no_text_leaves_the_number_to_the_reader() -> None:
    """``sequence(s)`` in a string of the product is a count that nobody has worded."""
    vague = re.compile(r"[a-z]{4,}\((?:s|es)\)(?:[ ,.;]|$)")
    found = [
        f"{path.relative_to(ROOT)}:{at}"
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*"))
        if path.suffix in (".py", ".html")
        for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if vague.search(line)
    ]
    assert found == []
