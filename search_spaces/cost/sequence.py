"""The order in which a step's large tensors come and go, as words that the allocator model can run.

Words stand apart by blanks: ``+name`` takes a tensor, ``-name`` frees it, ``?name`` frees it where nothing is kept for
a backward. Sizes are looked up by name, in bytes per token; a tensor of size 0 is left out. A name may be taken again
once it is free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from shardwright.search_spaces.cost.allocator import Block, CachingAllocator


@dataclass(frozen=True)
class Passage:
    """One piece of a layer: its forward, its backward, and the sizes of its tensors, bytes per token."""

    forward: str = ""
    backward: str = ""
    sizes: Mapping[str, float] = field(default_factory=dict)


def joined(passages: Iterable[Passage]) -> Passage:
    """Passages one after another; backward runs through them from behind."""
    found = list(passages)
    sizes: dict[str, float] = {}
    for one in found:
        sizes.update(one.sizes)
    return Passage(" ".join(p.forward for p in found), " ".join(p.backward for p in reversed(found)), sizes)


def apart(passage: Passage, prefix: str, shared: Collection[str]) -> Passage:
    """The passage with its own names told apart from other passages' by a prefix."""

    def told(name: str) -> str:
        return name if name in shared else prefix + name

    def text(words: str) -> str:
        return " ".join(word[0] + told(word[1:]) for word in words.split())

    return Passage(text(passage.forward), text(passage.backward), {told(name): s for name, s in passage.sizes.items()})


@dataclass
class Performance:
    """Runs passages for a number of tokens on an allocator."""

    allocator: CachingAllocator
    tokens: int

    def run(
        self,
        words: str,
        sizes: Mapping[str, float],
        held: dict[str, Block],
        *,
        keep: bool = True,
        stays: Collection[str] = (),
        skipped: Collection[str] = (),
    ) -> None:
        """One direction of a passage.

        Args:
            held: name → block that stands from before; updated.
            keep: whether a backward will need what is kept.
            stays: names that are not freed here.
            skipped: names that are neither taken nor freed here.
        """
        for word in words.split():
            action, name = word[0], word[1:]
            size = int(sizes[name] * self.tokens)
            if not size or name in skipped or (action == "?" and keep):
                continue
            if action == "+":
                assert name not in held, name
                held[name] = self.allocator.take(size)
            elif name not in stays:
                self.allocator.free(held.pop(name))
