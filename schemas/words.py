"""Counts as people say them."""

from __future__ import annotations


def plural(number: int, word: str) -> str:
    """``1 rank``, ``2,000 ranks``, ``3 batches``; the last word of several takes the ending."""
    ending = "es" if word.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}{ending}"
