"""Layers that share a selection: which layer's indexer chooses for each layer (GLM-5's ``indexer_types``). No torch.

A ``full`` layer runs its own indexer; a ``shared`` one takes the indices of the nearest full layer before it, in
forward and backward: its attention's loss against that indexer (``dsa_kl`` with those indices) adds to the same
q, k and weights, so one backward through the full layer's indexer serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.kernels import guards
from shardwright.kernels.dsa.indexer.contract import NAME

FULL, SHARED, DENSE = "full", "shared", "none"
NONE = -1
"""Source of a layer without sparse attention."""


def selection_sources(types: Sequence[str]) -> tuple[int, ...]:
    """Layer → the layer whose indexer chooses its keys; ``NONE`` where the layer attends to all.

    Args:
        types: ``full``, ``shared`` or ``none`` for each layer, in order.

    Raises:
        KernelError: ``unknown-indexer-type``, or ``shared-without-full`` where no full layer comes before.
    """
    found: list[int] = []
    latest = NONE
    for layer, kind in enumerate(types):
        if kind == FULL:
            latest = layer
        elif kind == SHARED:
            if latest == NONE:
                what = f"layer {layer} shares a selection, and no full layer comes before it"
                raise guards.refuse(NAME, "shared-without-full", what, "begin with a full layer")
        elif kind != DENSE:
            what = f"layer {layer} has indexer type {kind!r}"
            raise guards.refuse(NAME, "unknown-indexer-type", what, f"use one of {FULL}, {SHARED}, {DENSE}")
        found.append(NONE if kind == DENSE else latest)
    return tuple(found)
