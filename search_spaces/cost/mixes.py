"""Memory of attention residuals: what the mixes of a layer keep and need while they run, by token.

A mix holds its R rows in fp32 from forward to backward, ``4·R·H``; in forward the rows side by side and their product
with the weights besides, ``(b + 4)·R·H``; in backward five more of the fp32 size. Counted from the model's own code
(``checkpoints/models/kimi_k3/residuals.py``), which no operator replaces yet. Other families have none of it.

Legend: H hidden, R rows that a mix reads: snapshots and the running sum; b bytes a value.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.search_spaces.cost.family import SNAPSHOT_LAYERS, rows_at_end, rows_of_layer
from shardwright.search_spaces.cost.workload import LayerWork, Workload

ALIVE_IN_BACKWARD = 5
"""Tensors of the fp32 size that a mix's backward holds beside what was kept."""


@dataclass(frozen=True)
class Mixes:
    """Bytes a token; all zero without snapshots."""

    first: float = 0.0
    """Kept by the mix before attention."""
    second: float = 0.0
    """Kept by the mix before the feed-forward."""
    passing: float = 0.0
    """Alive only in a forward."""
    first_backward: float = 0.0
    second_backward: float = 0.0
    """Alive only in the backward of each, beside what it kept."""

    @property
    def kept(self) -> float:
        return self.first + self.second


def mixes_of(work: Workload, layer: LayerWork, *, mean: bool = False) -> Mixes:
    """Of the layer with most rows of a kind; ``mean``: of a kind's layers, for what they keep together."""
    block = SNAPSHOT_LAYERS.get(work.profile.model_type)
    if block is None:
        return Mixes()
    given = [rows_of_layer(index, block) for index in layer.kind.layer_indices]
    before, after = [rows for rows, _ in given], [rows + taken for rows, taken in given]
    count = len(given) if mean else 1
    return _mixes(work, *((sum(rows) if mean else max(rows)) / count for rows in (before, after)))


def last_mix(work: Workload) -> Mixes:
    """The mix before the last norm: ``first``."""
    block = SNAPSHOT_LAYERS.get(work.profile.model_type)
    return Mixes() if block is None else _mixes(work, rows_at_end(work.profile.shape.num_layers, block), 0)


def snapshot_gradients(work: Workload) -> float:
    """Gradients of snapshots, which gather from the last layer's backward to that of the layer that took them."""
    block = SNAPSHOT_LAYERS.get(work.profile.model_type)
    if block is None:
        return 0.0
    return work.base_bytes * work.hidden * (rows_at_end(work.profile.shape.num_layers, block) - 1)


def _mixes(work: Workload, before: float, after: float) -> Mixes:
    wide, b = 4 * work.hidden, work.base_bytes * work.hidden
    backward = (ALIVE_IN_BACKWARD * wide * rows + b if rows else 0.0 for rows in (before, after))
    return Mixes(wide * before, wide * after, (wide + b) * max(before, after), *backward)
