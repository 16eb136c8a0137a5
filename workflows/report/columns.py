"""Rows of words side by side in a terminal: every column as narrow as the room asks, none cut off."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

GAP = 2
"""Blanks between two columns."""
NARROWEST = 6
"""A column is not made narrower than this, whatever the room."""


def widths(rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Width of each column: what its longest cell needs, less where the row would not fit into ``room`` characters.

    Columns of sentences give way before columns of single words, the widest first.
    """
    columns = list(zip(*rows, strict=True))
    found = [max(1, *map(len, column)) for column in columns]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    spare = sum(found) + GAP * (len(found) - 1) - room
    for least in (words, [NARROWEST] * len(found)):
        while spare > 0:
            able = [i for i, width in enumerate(found) if width > max(least[i], NARROWEST)]
            if not able:
                break
            found[max(able, key=lambda i: found[i])] -= 1
            spare -= 1
    return found


def line_up(row: Sequence[str], sizes: Sequence[int], right: Sequence[int] = ()) -> str:
    """One row as lines of text; columns in ``right`` stand to the right."""
    cells = [textwrap.wrap(cell, size, break_on_hyphens=False) or [""] for cell, size in zip(row, sizes, strict=True)]
    lines = []
    for parts in zip_longest(*cells, fillvalue=""):
        padded = (p.rjust(n) if i in right else p.ljust(n) for i, (p, n) in enumerate(zip(parts, sizes, strict=True)))
        lines.append((" " * GAP).join(padded).rstrip())
    return "\n".join(lines)
