"""The device mesh: replicate × shard × ep × cp, and the groups that each kind of parameter uses.

Rank of coordinates (r, s, e, c) is ``((r · shard + s) · ep + e) · cp + c``: neighbours share sequences, then experts.
Dense weights are sharded over shard × ep × cp; expert stacks are cut by ep, then sharded over shard × cp. The ranks of
a CP group read the same data, each its own tokens of it; all others read their own. Within one replica each adapter
value lives on exactly one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.runtime.context import Place
from shardwright.runtime.device import Device
from shardwright.schemas.errors import ClusterError
from shardwright.schemas.strategy import Mesh


@dataclass(frozen=True)
class Ranks:
    """Where this rank stands.

    Attributes:
        sizes: the plan's degrees.
        experts: mesh (replicate, shard, ep), in which ``shard`` is shard × cp.
        dense: mesh (replicate, dense_shard), ``dense_shard`` = shard × ep × cp.
        state: mesh (replicate, ep, shard) over the same ranks, describing expert stacks in saves: dim 0 is cut by ep
            first, then by shard × cp.
        context: mesh (data, cp); ``None`` where sequences are whole.
    """

    sizes: Mesh
    rank: int
    experts: DeviceMesh
    dense: DeviceMesh
    state: DeviceMesh
    context: DeviceMesh | None = None

    @property
    def world(self) -> int:
        return self.sizes.world_size

    @property
    def ep_rank(self) -> int:
        return self.rank // self.sizes.cp % self.sizes.ep

    @property
    def expert_shards(self) -> int:
        """Ranks that share the experts of one EP rank."""
        return self.sizes.shard * self.sizes.cp

    @property
    def dense_shards(self) -> int:
        """Ranks that share the weights outside expert stacks."""
        return self.sizes.shard * self.sizes.ep * self.sizes.cp

    @property
    def data_rank(self) -> int:
        """Which slice of every batch this rank reads."""
        return self.rank // self.sizes.cp

    @property
    def place(self) -> Place | None:
        """This rank's place among those that share its sequences; ``None`` where they are whole."""
        if self.context is None:
            return None
        return Place(self.sizes.cp, self.rank % self.sizes.cp, self.context.get_group("cp"))

    @property
    def ep_group(self) -> dist.ProcessGroup:
        return self.experts.get_group("ep")

    @property
    def owner_group(self) -> dist.ProcessGroup:
        """Ranks that together hold one copy of every adapter value: one replica."""
        return self.dense.get_group("dense_shard")

    @property
    def replicate_group(self) -> dist.ProcessGroup:
        return self.dense.get_group("replicate")

    def dense_fsdp(self) -> DeviceMesh | None:
        """Mesh for ``fully_shard`` of dense weights; ``None`` for one rank."""
        return _fsdp_mesh(self.dense, "dense_shard", self.sizes.replicate, self.dense_shards)

    def expert_fsdp(self) -> DeviceMesh | None:
        """Mesh for ``fully_shard`` of expert stacks; ``None`` where a rank keeps its experts whole."""
        return _fsdp_mesh(self.experts, "shard", self.sizes.replicate, self.expert_shards)


def _fsdp_mesh(mesh: DeviceMesh, axis: str, replicate: int, shard: int) -> DeviceMesh | None:
    if replicate * shard == 1:
        return None
    return mesh[axis] if replicate == 1 else mesh["replicate", axis]


def open_mesh(sizes: Mesh, device: Device) -> Ranks:
    """Make the meshes. The process group must be up.

    Raises:
        ClusterError: ``world-size`` when the started ranks are not the plan's, ``axis-not-run`` for tp or pp > 1.
    """
    world = dist.get_world_size()
    if world != sizes.world_size:
        raise ClusterError(
            "world-size",
            f"the plan's mesh {sizes.text()} needs {sizes.world_size} ranks, {world} were started",
            where="decision.strategy.mesh",
            next_action=f"start {sizes.world_size} workers, or plan for {world} ranks",
        )
    if sizes.tp * sizes.pp != 1:
        raise ClusterError(
            "axis-not-run",
            f"tp {sizes.tp}, pp {sizes.pp}: this runtime runs 1 of each",
            where="decision.strategy.mesh",
            next_action="choose a plan over replicate, shard, ep and cp",
        )
    dense_shape = (sizes.replicate, sizes.shard * sizes.ep * sizes.cp)
    dense = init_device_mesh(device.kind, dense_shape, mesh_dim_names=("replicate", "dense_shard"))
    by_axis = torch.arange(world).reshape(sizes.replicate, sizes.shard, sizes.ep, sizes.cp)

    def mesh(order: Tensor, *names: str) -> DeviceMesh:
        return DeviceMesh(device.kind, order.contiguous(), mesh_dim_names=names)

    experts = mesh(by_axis.transpose(2, 3).flatten(1, 2), "replicate", "shard", "ep")
    state = mesh(by_axis.permute(0, 2, 1, 3).flatten(2, 3), "replicate", "ep", "shard")
    context = mesh(by_axis.flatten(0, 2), "data", "cp") if sizes.cp > 1 else None
    return Ranks(sizes, dist.get_rank(), experts, dense, state, context)
