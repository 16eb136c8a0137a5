"""Gathered weights alive at once, as FSDP2 orders them.

Forward: a unit's flat all-gather result is held until the next unit has copied its own out, so there stand the one
before in its flat form and this one flat and whole; units that are gathered ahead stand flat. Backward: this one whole,
beside it its own flat form until it is copied out, then those gathered behind it. Traced on rank 0 of 128 of a fake
process group (``benchmarks/k3_simulate.py``).

A layer's experts are a unit of their own. In FSDP2's own order each unit asks for the one before it, so while experts'
gradients are made only the flat form of the non-expert weights of the layer before stands beside the whole layer; its
experts are asked for when that layer's backward begins.

Legend: U bytes of one layer gathered, P prefetch depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.search_spaces.cost.plans import Array, Plans
from shardwright.search_spaces.cost.workload import Workload


@dataclass(frozen=True)
class GatherPeaks:
    """Bytes of every plan."""

    forward: Array
    """The most over all layers but what stands at the first one."""
    backward: Array
    working: Array
    """The most of backward once experts are copied out, beside their gradients."""
    first: Array
    """The first layer, flat and whole; with the root's flat form before it."""


def layer_order(work: Workload) -> tuple[int, ...]:
    """The kind of each layer, first to last."""
    kinds = {index: place for place, layer in enumerate(work.layers) for index in layer.kind.layer_indices}
    return tuple(kinds[index] for index in sorted(kinds))


def gather_peaks(
    layers: Sequence[Array], order: Sequence[int], plans: Plans, dense: Sequence[Array] | None = None
) -> GatherPeaks:
    """Peaks over all layers.

    Args:
        layers: U of each kind, a value a plan.
        order: the kind of each layer.
        dense: of these what is not experts' own unit; all of it unless told.
    """
    dense = layers if dense is None else dense
    forward, backward, working = np.zeros(len(plans)), np.zeros(len(plans)), np.zeros(len(plans))
    for depth in (int(depth) for depth in np.unique(plans.prefetch)):
        ahead, behind, beside = np.zeros(len(plans)), np.zeros(len(plans)), np.zeros(len(plans))
        for own, before, after in _windows(tuple(order), depth):
            waiting = sum((layers[kind] for kind in after), start=np.zeros(len(plans))) if depth > 1 else 0.0
            previous = layers[before[0]] if before else 0.0
            ahead = np.maximum(ahead, 2 * layers[own] + np.maximum(previous, waiting))
            next_back = sum((layers[kind] for kind in before), start=np.zeros(len(plans)))
            behind = np.maximum(behind, layers[own] + np.maximum(layers[own], next_back))
            if depth <= 1:
                beside = np.maximum(beside, layers[own] + (dense[before[0]] if before else 0.0))
        chosen = plans.prefetch == depth
        forward, backward = np.where(chosen, ahead, forward), np.where(chosen, behind, backward)
        working = np.where(chosen, beside if depth <= 1 else behind, working)
    first = 2 * layers[order[0]] if order else np.zeros(len(plans))
    return GatherPeaks(forward, backward, working, first)


def largest_unit(layers: Sequence[Array], plans: Plans) -> Array:
    """The largest U."""
    return np.asarray(np.max([np.zeros(len(plans)), *layers], axis=0))


def _windows(order: tuple[int, ...], depth: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(kind, kinds of the layers before it, nearest first, kinds of those after it), each different one once."""
    seen = set()
    for place, own in enumerate(order):
        window = own, order[max(0, place - depth) : place][::-1], order[place + 1 : place + 1 + depth]
        if window not in seen:
            seen.add(window)
            yield window
