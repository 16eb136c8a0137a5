"""The axes in sampling order: each one's legal values follow from those before it."""

from __future__ import annotations

from shardwright.search_spaces.axes import (
    accumulation,
    base_format,
    checkpointing,
    cp,
    dispatch,
    ep,
    expert_padding,
    expert_tp,
    micro_batch,
    offload,
    overlap,
    overlap_chunks,
    placement,
    pp,
    prefetch,
    redundancy,
    replicate,
    reshard,
    reshard_scope,
    shard,
    tp,
)
from shardwright.search_spaces.axes.base import Axis

MESH: tuple[Axis, ...] = (
    pp.AXIS,
    cp.AXIS,
    tp.AXIS,
    replicate.AXIS,
    ep.AXIS,
    shard.AXIS,
    expert_tp.AXIS,
    micro_batch.AXIS,
    accumulation.AXIS,
)
"""The mesh and its batch."""

SCHEDULE: tuple[Axis, ...] = (
    checkpointing.AXIS,
    reshard.AXIS,
    reshard_scope.AXIS,
    prefetch.AXIS,
    expert_padding.AXIS,
    overlap.AXIS,
    overlap_chunks.AXIS,
    dispatch.AXIS,
    offload.AXIS,
    base_format.AXIS,
    placement.AXIS,
    redundancy.AXIS,
)
"""Everything else; of the mesh these see only ``space.signature``."""

AXES: tuple[Axis, ...] = (*MESH, *SCHEDULE)
