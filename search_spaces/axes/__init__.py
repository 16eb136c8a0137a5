"""The axes in sampling order: each one's legal values follow from those before it."""

from __future__ import annotations

from shardwright.search_spaces.axes import (
    accumulation,
    checkpointing,
    cp,
    ep,
    expert_padding,
    micro_batch,
    offload,
    overlap,
    placement,
    pp,
    prefetch,
    replicate,
    reshard,
    shard,
    tp,
)
from shardwright.search_spaces.axes.base import Axis

AXES: tuple[Axis, ...] = (
    pp.AXIS,
    cp.AXIS,
    tp.AXIS,
    replicate.AXIS,
    ep.AXIS,
    shard.AXIS,
    micro_batch.AXIS,
    accumulation.AXIS,
    checkpointing.AXIS,
    reshard.AXIS,
    prefetch.AXIS,
    expert_padding.AXIS,
    overlap.AXIS,
    offload.AXIS,
    placement.AXIS,
)
