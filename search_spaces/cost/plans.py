"""Many strategies as columns: the one form that every cost term reads, for one plan or for a million.

Legend: S tokens of a sequence, T tokens of one micro-batch on a rank, e = EP degree, t = TP degree,
z = shards of one EP rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwright.schemas.profile import CheckpointProfile
from shardwright.schemas.strategy import ParallelStrategy

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

OFFLOADS = ("none", "adapter_optimizer", "activations", "frozen_experts")
FORMATS = ("compute", "fp8", "mxfp4", "int4")


@dataclass(frozen=True)
class Plans:
    """One entry a plan in every column."""

    replicate: Array
    shard: Array
    ep: Array
    tp: Array
    cp: Array
    pp: Array
    expert_tp: Array
    micro: Array
    accumulation: Array
    recomputed: Array
    """[kinds, plans]: layers of each kind that are recomputed in backward."""
    reshard: Flags
    node_scope: Flags
    prefetch: Array
    padding: Array
    chunks: Array
    shared: Flags
    """The shared expert runs under the dispatch."""
    hierarchical: Flags
    offload: NDArray[np.int64]
    """Position in ``OFFLOADS``."""
    format: NDArray[np.int64]
    """Position in ``FORMATS``."""
    balanced: Flags
    redundant: Array

    def __len__(self) -> int:
        return len(self.ep)

    def take(self, chosen: NDArray[np.int64] | Flags | slice) -> Plans:
        """The chosen plans, in that order."""
        return type(self)(**{field.name: getattr(self, field.name)[..., chosen] for field in fields(self)})

    @cached_property
    def data_ranks(self) -> Array:
        return self.replicate * self.shard * self.ep

    @cached_property
    def world(self) -> Array:
        return self.data_ranks * self.tp * self.cp * self.pp

    @cached_property
    def dense_shards(self) -> Array:
        """Ranks that share one copy of the non-expert parameters, after tp: shard · ep · cp."""
        return self.shard * self.ep * self.cp

    @cached_property
    def expert_shards(self) -> Array:
        """Ranks that share one EP rank's experts: shard · tp · cp / expert_tp."""
        return self.shard * self.tp * self.cp / self.expert_tp

    def tokens(self, sequence: int) -> Array:
        """Tokens that a rank holds between blocks: micro · S / (cp · tp), sequence-parallel over tp."""
        return np.ceil(self.micro * sequence / (self.cp * self.tp))

    def offloads(self, name: str) -> Flags:
        return self.offload == OFFLOADS.index(name)

    def stage_share(self, layers: int) -> Array:
        """Layers of the fullest pipeline stage over all layers."""
        return np.ceil(layers / self.pp) / layers


def plans_of(strategies: Sequence[ParallelStrategy], profile: CheckpointProfile) -> Plans:
    """Strategies as columns, in their order."""

    def column(values: list[int]) -> Array:
        return np.array(values, dtype=np.float64)

    def flags(values: list[bool]) -> Flags:
        return np.array(values, dtype=np.bool_)

    def mesh(name: str) -> Array:
        return column([getattr(s.mesh, name) for s in strategies])

    return Plans(
        **{name: mesh(name) for name in ("replicate", "shard", "ep", "tp", "cp", "pp", "expert_tp")},
        micro=column([s.micro_batch_sequences for s in strategies]),
        accumulation=column([s.accumulation_steps for s in strategies]),
        recomputed=np.array(
            [[recomputed_layers(s, kind.layer_indices) for s in strategies] for kind in profile.layer_kinds],
            dtype=np.float64,
        ).reshape(len(profile.layer_kinds), len(strategies)),
        reshard=flags([s.reshard_after_forward for s in strategies]),
        node_scope=flags([s.reshard_scope == "node" for s in strategies]),
        prefetch=column([s.prefetch_depth for s in strategies]),
        padding=column([s.expert_padding_tokens for s in strategies]),
        chunks=column([s.overlap_chunks for s in strategies]),
        shared=flags([s.overlap == "shared" for s in strategies]),
        hierarchical=flags([s.dispatch == "hierarchical" for s in strategies]),
        offload=np.array([OFFLOADS.index(s.offload) for s in strategies], dtype=np.int64),
        format=np.array([FORMATS.index(s.base_format) for s in strategies], dtype=np.int64),
        balanced=flags([s.expert_placement == "balanced" for s in strategies]),
        redundant=column([s.redundant_experts for s in strategies]),
    )


def recomputed_layers(strategy: ParallelStrategy, layers: Sequence[int]) -> int:
    """How many of these layers the strategy recomputes in backward."""
    if strategy.checkpointing == "layers":
        return len(set(strategy.checkpointed_layers) & set(layers))
    return len(layers) if strategy.checkpointing == "full" else 0


def per_value(values: Array, function: Callable[[int], tuple[float, ...]]) -> Array:
    """``function`` of every distinct value, spread over the column: [results, plans]."""
    unique, inverse = np.unique(values, return_inverse=True)
    return np.array([function(int(value)) for value in unique], dtype=np.float64)[inverse.reshape(-1)].T
