"""How the runtime spreads parameters: the one rule that legality, memory and communication share.

Legend: E experts, I expert width, e = EP degree, z = shard degree.
Non-expert parameters and their adapters: FSDP over shard × ep. Expert stacks ``[E, 2I, H]`` and
``[E, H, I]`` and their adapters: dim 0 split over ep, what is left split by FSDP over shard.
A group of one rank is not wrapped: nothing is gathered and nothing is copied. Replicas hold copies.
"""

from __future__ import annotations

from shardwright.schemas.profile import ModelShape
from shardwright.schemas.strategy import Mesh


def dense_shards(mesh: Mesh) -> int:
    """Ranks that share one copy of the non-expert parameters."""
    return mesh.shard * mesh.ep


def expert_shards(mesh: Mesh) -> int:
    """FSDP ranks that share one EP rank's experts."""
    return mesh.shard


def local_experts(experts: int, mesh: Mesh) -> int:
    """Experts of one EP rank; ``experts`` must be divisible by ep."""
    return experts // mesh.ep


def expert_shard_dim(experts: int, mesh: Mesh, rows: int, columns: int) -> int:
    """Dimension on which FSDP splits a local stack ``[E / e, rows, columns]``.

    0 while every shard rank gets at least one expert, else 1 or 2 where that divides evenly, else 0
    with padding. Replicas never count: only shard is compared with E / e.
    """
    if local_experts(experts, mesh) >= mesh.shard:
        return 0
    return next((dim for dim, size in ((1, rows), (2, columns)) if size % mesh.shard == 0), 0)


def expert_padding_factor(shape: ModelShape, mesh: Mesh) -> float:
    """Stored over real expert values per rank.

    ``ceil(n / z) · z / n`` where a stack is split on dim 0, with n = E / e; 1 elsewhere. Two thirds of the
    values stand in ``[E, 2I, H]``, one third in ``[E, H, I]``.
    """
    if shape.num_experts == 0:
        return 1.0
    hidden, width = shape.hidden_size, shape.expert_intermediate_size
    rows = local_experts(shape.num_experts, mesh)
    padded = -(-rows // mesh.shard) * mesh.shard / rows

    def factor(inner: int, outer: int) -> float:
        return padded if expert_shard_dim(shape.num_experts, mesh, inner, outer) == 0 else 1.0

    return (2 * factor(2 * width, hidden) + factor(hidden, width)) / 3
