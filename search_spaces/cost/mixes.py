"""Memory of residual streams: what a layer's attention residuals or hyper-connections keep and need, by token.

Kimi K3's mix holds its R rows in fp32 from forward to backward, ``4·R·H``; in forward the rows side by side and their
product with the weights besides, ``(b + 4)·R·H``; in backward five more of the fp32 size. Counted from the model's own
code (``checkpoints/models/kimi_k3/residuals.py``). By a kernel it holds ``4·(2·R + 1)``, two numbers of each row, and
in backward the gradients of its rows (``kernels/attention_residual``). A hyper-connection reads and writes N streams:
``CONNECTIONS`` times ``b·N·H``, of the families' own code, which no operator replaces. Other families have neither.

Legend: H hidden, R rows that a mix reads: snapshots and the running sum; N residual streams; b bytes a value.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.residuals import (
    SNAPSHOT_LAYERS,
    provider_of_mixes,
    rows_at_end,
    rows_of_layer,
)
from shardwright.search_spaces.cost.workload import LayerWork, Workload

ALIVE_IN_BACKWARD = 5
"""Tensors of the fp32 size that a mix's backward holds beside what was kept."""

STATISTIC_BYTES = 4
"""Of one number that the kernel keeps: a row's length, its logit, a token's sum."""

CONNECTIONS = {
    "deepseek_v4": (3.8, 2.3, 10.2),
    "glm5_next": (3.8, 2.3, 10.2),
    "hy_v4": (2.8, 5.3, 9.5),
    "qwen4_exp": (6.4, 1.3, 8.7),
}
"""Streams in bf16 that a hyper-connection and the sum behind it keep, hold besides in forward, and in backward; with
frozen weights, its result and the streams that it was given not counted."""
MOST = (6.4, 5.3, 10.2)
"""Of a family that is not among them."""


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


def mixes_of(work: Workload, layer: LayerWork, fused: FusedProviders, *, mean: bool = False) -> Mixes:
    """Of the layer with most rows of a kind; ``mean``: of a kind's layers, for what they keep together."""
    block = SNAPSHOT_LAYERS.get(work.profile.model_type)
    if block is None:
        return _connections(work)
    given = [rows_of_layer(index, block) for index in layer.kind.layer_indices]
    before, after = [rows for rows, _ in given], [rows + taken for rows, taken in given]
    count = len(given) if mean else 1
    return _mixes(work, fused, *((sum(rows) if mean else max(rows)) / count for rows in (before, after)))


def last_mix(work: Workload, fused: FusedProviders) -> Mixes:
    """The mix before the last norm: ``first``."""
    block = SNAPSHOT_LAYERS.get(work.profile.model_type)
    return Mixes() if block is None else _mixes(work, fused, rows_at_end(work.profile.shape.num_layers, block), 0)


def snapshot_gradients(work: Workload) -> float:
    """Gradients of snapshots, which gather from the last layer's backward to that of the layer that took them."""
    block = SNAPSHOT_LAYERS.get(work.profile.model_type)
    if block is None:
        return 0.0
    return work.base_bytes * work.hidden * (rows_at_end(work.profile.shape.num_layers, block) - 1)


def _mixes(work: Workload, fused: FusedProviders, before: float, after: float) -> Mixes:
    wide, b = 4 * work.hidden, work.base_bytes * work.hidden
    if provider_of_mixes(fused) == "shardwright":
        first, second = (STATISTIC_BYTES * (2 * rows + 1) if rows else 0.0 for rows in (before, after))
        return Mixes(first, second, 0.0, *(b * (rows + 1) if rows else 0.0 for rows in (before, after)))
    backward = (ALIVE_IN_BACKWARD * wide * rows + b if rows else 0.0 for rows in (before, after))
    return Mixes(wide * before, wide * after, (wide + b) * max(before, after), *backward)


def _connections(work: Workload) -> Mixes:
    """Both hyper-connections of a layer: the streams that the second is given are the layer's own."""
    streams = work.profile.shape.residual_streams
    if streams == 1:
        return Mixes()
    one = work.base_bytes * work.hidden * streams
    kept, passing, backward = (one * times for times in CONNECTIONS.get(work.profile.model_type, MOST))
    return Mixes(kept, kept + one, passing, backward, backward)
