"""Short texts of a fixed grammar, so that a tiny model's loss can fall."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def documents(seed: int, count: int) -> Iterator[str]:
    """Short texts of a fixed grammar, so that a loss can fall."""
    bits = np.random.PCG64(seed)
    slots = (
        ("the worker", "the router", "a shard", "the plan", "an expert", "the mesh"),
        ("sends", "holds", "reads", "merges", "checks", "loads"),
        ("a token", "the weights", "a gradient", "the index", "an adapter", "the batch"),
        ("on rank zero", "on rank one", "in memory", "on disk", "after the step", "before the step"),
    )
    for _ in range(count):
        sentences = [
            " ".join(choices[bits.random_raw() % len(choices)] for choices in slots)
            for _ in range(2 + bits.random_raw() % 4)
        ]
        yield ". ".join(sentences) + ".\n"
