"""The collective of delta-rule layers under context parallelism: one rank's numbers to all ranks, in sequence order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.kernels.kda.context import Neighbours


def neighbours(group: dist.ProcessGroup | None, *, continues: bool) -> Neighbours:
    """This rank's place in a sequence that is cut over a group, rank 0 first.

    Args:
        continues: whether this rank's first document began on an earlier rank.
    """

    def gather(value: Tensor) -> Tensor:
        value = value.contiguous()
        found = value.new_empty((dist.get_world_size(group), *value.shape))
        dist.all_gather(list(torch.unbind(found)), value, group=group)
        return found

    return Neighbours(dist.get_rank(group), gather, continues)
