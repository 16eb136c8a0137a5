"""What the allocator holds beyond the peak: memory between tensors that nothing later fits into.

The exact model of the allocator runs two steps of the model's own tensors in order, kept whole or recomputed by layer.
All of them grow with the tokens, and so do the holes: they are found once for a model, its operators and its adapters,
per token. Weights, which never move, stand below; gradients and moments, which do not grow with tokens, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardwright.search_spaces.cost.allocator import Block, CachingAllocator
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.gathers import layer_order
from shardwright.search_spaces.cost.plans import Array, Plans
from shardwright.search_spaces.cost.sequence import Passage, Performance
from shardwright.search_spaces.cost.sequence_layers import REPEATED, head_passage, layer_passage
from shardwright.search_spaces.cost.workload import Workload

LEAST_TOKENS = 1024
"""Shorter sequences are run as this long, so that pages do not matter."""

WINDOW = 3
"""Lengths that are run for one: the power of two at or above it, and its halves. The most of them counts, so that what
is held does not fall with longer sequences."""

LAYERS = 8
"""Layers that are run at most; further ones repeat what these leave."""

STEPS = 2

Words = tuple[str, str, tuple[tuple[str, float], ...]]
"""Forward, backward and sizes of a passage, as a key."""


@dataclass(frozen=True)
class Score:
    """A model's passages: its kinds of layers, then its head, and the place of each layer's kind in order.

    The first ``silent`` layers have no gradient.
    """

    kinds: tuple[Words, ...]
    head: Words
    order: tuple[int, ...]
    silent: int

    @classmethod
    def of(cls, work: Workload, fused: FusedProviders) -> Score:
        kinds = [_words(layer_passage(work, layer, fused)) for layer in work.layers]
        order, silent = list(layer_order(work)), sum(layer.silent for layer in work.layers)
        if silent < len(order) and work.layers[order[silent]].headless:
            kinds.append(_words(layer_passage(work, work.layers[order[silent]], fused, headless=True)))
            order[silent] = len(kinds) - 1
        chosen = _chosen(order)
        silent = sum(place < silent for place in chosen)
        return cls(tuple(kinds), _words(head_passage(work, fused)), tuple(order[place] for place in chosen), silent)


def hole_bytes(work: Workload, plans: Plans, fused: FusedProviders, grows: bool = True) -> Array:
    """Bytes held beyond the peak; where only some layers are recomputed, the more of both ways."""
    again, layers = plans.recomputed.sum(axis=0), sum(layer.count for layer in work.layers)
    most = np.zeros(len(plans))
    for recompute, asked in ((False, again < layers), (True, again > 0)):
        if np.any(asked):
            most = np.where(asked, np.maximum(most, _per_token(work, fused, recompute, grows)), most)
    return np.asarray(most * plans.tokens(work.recipe.batch.sequence_tokens))


def _per_token(work: Workload, fused: FusedProviders, recompute: bool, grows: bool) -> float:
    """Holes of one sequence over its tokens: between powers of two in proportion."""
    key = (fused.key, recompute, grows)
    found = work.known.get(key)
    if found is None:
        tokens = max(LEAST_TOKENS, work.recipe.batch.sequence_tokens)
        upper = 1 << (tokens - 1).bit_length()
        held = [_of_length(work, upper >> back, fused, recompute, grows) for back in range(WINDOW + 1)]
        above, below = max(held[:WINDOW]), max(held[1:])
        at = below + (above - below) * (tokens - upper / 2) / (upper / 2)
        found = work.known[key] = at / tokens
    return found


def _of_length(work: Workload, tokens: int, fused: FusedProviders, recompute: bool, grows: bool) -> float:
    """Holes of one sequence of that many tokens."""
    batch = work.recipe.batch.model_copy(update={"sequence_tokens": tokens})
    other = replace(work, recipe=work.recipe.model_copy(update={"batch": batch}))
    run_as = max(tokens, LEAST_TOKENS)
    return beyond_peak(Score.of(other, fused), run_as, recompute, grows) * tokens / run_as


@lru_cache(maxsize=256)
def beyond_peak(score: Score, tokens: int, recompute: bool, grows: bool) -> int:
    """Most held less most taken, of ``STEPS`` steps; at least nothing."""
    show = Performance(CachingAllocator(grows), tokens)
    for _ in range(STEPS):
        _step(show, score, recompute)
    return max(0, show.allocator.peak_reserved - show.allocator.peak)


def _step(show: Performance, score: Score, recompute: bool) -> None:
    """Forward, loss and backward. A recomputed layer keeps its input and what was chosen in it, and runs again."""
    sizes, of_head = [dict(words[2]) for words in score.kinds], dict(score.head[2])
    kept = ("x", *REPEATED)
    states: list[dict[str, Block]] = []
    given = show.allocator.take(int(of_head["x"] * show.tokens))
    for place, kind in enumerate(score.order):
        held, live = {"x": given}, place >= score.silent
        stays = kept if recompute and live else ()
        show.run(score.kinds[kind][0], sizes[kind], held, keep=live and not recompute, stays=stays)
        given = held.pop("x3")
        states.append(held)
    held = {"x": given}
    show.run(score.head[0], of_head, held)
    show.run(score.head[1], of_head, held)
    gradient = held.pop("gx")
    for place in reversed(range(score.silent, len(score.order))):
        kind, held = score.order[place], states[place]
        if recompute:
            show.run(score.kinds[kind][0], sizes[kind], held, stays=kept, skipped=("x3", *REPEATED))
        show.run(score.kinds[kind][1], sizes[kind], held, stays=kept if recompute else ())
        for block in held.values():
            show.allocator.free(block)
    show.allocator.free(gradient)


def _words(passage: Passage) -> Words:
    return passage.forward, passage.backward, tuple(passage.sizes.items())


def _chosen(order: Sequence[int]) -> list[int]:
    """Places of at most ``LAYERS`` layers, spread evenly, and of the first of each kind."""
    if len(order) <= LAYERS:
        return list(range(len(order)))
    spread = {round(place * (len(order) - 1) / (LAYERS - 1)) for place in range(LAYERS)}
    return sorted(spread | {order.index(kind) for kind in set(order)})
