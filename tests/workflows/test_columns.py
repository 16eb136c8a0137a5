"""Columns of a terminal: they fit where they can, and lose nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.workflows.report.columns import GAP, NARROWEST, line_up, widths

CELL = st.lists(st.text("abc:_", min_size=1, max_size=30), max_size=4).map(" ".join)
ROWS = st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(CELL, min_size=n, max_size=n), min_size=1, max_size=5))


@settings(deadline=None)
@given(ROWS, st.integers(20, 120))
def test_rows_fit_the_room_and_keep_every_letter(rows: list[list[str]], room: int) -> None:
    sizes = widths(rows, room)
    least = sum(min(NARROWEST, max(1, *map(len, column))) for column in zip(*rows, strict=True)) + GAP * (
        len(sizes) - 1
    )
    for row in rows:
        text = line_up(row, sizes)
        assert max(map(len, text.splitlines() or [""])) <= max(room, least)
        assert sorted(text.replace(" ", "").replace("\n", "")) == sorted("".join(row).replace(" ", ""))


def test_sentences_give_way_before_names() -> None:
    rows = [["rms_norm:layer:post_attention_layernorm", "11.2× modelled, 0.663 ms → 0.0592 ms"], ["short", "1"]]
    sizes = widths(rows, 60)
    assert sizes[0] == len(rows[0][0]) and sum(sizes) + GAP == 60
    first = line_up(rows[0], sizes).splitlines()
    assert first[0].startswith(rows[0][0]) and first[1].strip() == "0.663 ms → 0.0592"


def test_numbers_stand_to_the_right() -> None:
    assert line_up(["a", "7"], [3, 5], right=(1,)) == "a        7"
