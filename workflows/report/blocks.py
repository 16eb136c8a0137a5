"""The pieces a report is made of; the Markdown and HTML writers both render these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph; spans between backticks are code."""

    text: str


@dataclass(frozen=True)
class Tile:
    """One figure of the summary."""

    label: str
    value: str
    note: str = ""
    tone: str = ""
    """``good``, ``bad`` or empty; the value says the same in words."""


@dataclass(frozen=True)
class Tiles:
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Table:
    """Rows of text.

    Columns in ``numeric`` are right-aligned. ``prose`` is a column of sentences: a terminal puts it on lines of its
    own below the row. ``closed`` hides the table behind its caption in HTML until it is opened; ``folded`` also leaves
    it out of a terminal.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[int, ...] = ()
    caption: str = ""
    folded: bool = False
    closed: bool = False
    prose: int | None = None


@dataclass(frozen=True)
class Figure:
    """A self-contained SVG; Markdown leaves it out, so its numbers also stand in a table."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Code:
    text: str
    language: str = ""


Block = Heading | Text | Tiles | Table | Figure | Code
Document = tuple[Block, ...]
