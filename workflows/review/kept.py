"""Regions that the plan itself leaves eager: one folded group of the page, by why they stay."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.workflows.review.cards import Card

_WHY = (
    (re.compile(r"eager: nothing else exists\b"), "no other way exists yet"),
    (re.compile(r"eager: nothing else applies\b"), "no other way applies here"),
    (re.compile(r"eager: .*\bcompile time is not repaid on a CPU cluster"), "compiling is not repaid on a CPU cluster"),
    (re.compile(r"eager: \S+ is not faster\b"), "no other way is faster"),
)
"""How a chosen eager variant's reason begins, and what is said of all that share it."""
OTHER = "a reason of its own, on the card"


@dataclass(frozen=True)
class Group:
    """Cards that stay eager for one reason."""

    why: str
    cards: tuple[Card, ...]

    @property
    def number(self) -> int:
        return len(self.cards)


def why_eager(reason: str) -> str:
    """The reason in a few words, the same for all cards that share it."""
    return next((words for begins, words in _WHY if begins.match(reason)), OTHER)


def grouped(cards: Iterable[Card]) -> tuple[Group, ...]:
    """The cards by why they stay eager: the largest group first, cards of no known reason last."""
    found: dict[str, list[Card]] = defaultdict(list)
    for card in cards:
        found[why_eager(card.proposal.reason)].append(card)
    order = sorted(found.items(), key=lambda item: (item[0] == OTHER, -len(item[1]), item[0]))
    return tuple(Group(why, tuple(held)) for why, held in order)
