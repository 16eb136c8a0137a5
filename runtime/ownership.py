"""Which part of each parameter this rank keeps, in coordinates of the whole parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.lora.inject import is_adapter
from shardwright.runtime.mesh import Ranks

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Owned:
    """One parameter as this rank holds it.

    Attributes:
        name: fully qualified.
        shape: of the whole parameter over all ranks.
        box: (start, stop) of this rank's part, for each dim; empty extents where it keeps nothing.
        parameter: plain, or a DTensor under FSDP.
        expert: an expert stack (or its adapter): dim 0 is also cut by ep.
        shard_dim: dim that FSDP cuts; ``None`` where it does not.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    parameter: nn.Parameter
    expert: bool
    shard_dim: int | None

    @property
    def adapter(self) -> bool:
        return is_adapter(self.name)

    def local(self) -> Tensor:
        """This rank's values, sharing storage with the parameter."""
        return local_values(self.parameter)

    def local_grad(self) -> Tensor | None:
        """This rank's part of the summed gradient, or ``None``."""
        gradient = self.parameter.grad
        return None if gradient is None else local_values(gradient)


def local_values(value: Tensor) -> Tensor:
    """A DTensor's local tensor, or the tensor itself, detached."""
    if isinstance(value, DTensor):
        local: Tensor = value.to_local()
        return local.detach()
    return value.detach()


def owned_parameters(model: nn.Module) -> dict[str, Owned]:
    """All parameters, tied ones once, in module order."""
    experts = {name: module for name, module in model.named_modules() if isinstance(module, LoraExperts)}
    found = {}
    for name, parameter in model.named_parameters():
        module = experts.get(name.rpartition(".")[0])
        shape, offset, extent = tuple(parameter.shape), (0,) * parameter.dim(), tuple(parameter.shape)
        shard_dim = None
        if isinstance(parameter, DTensor):
            extent, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            shard_dim = next((place.dim for place in parameter.placements if isinstance(place, Shard)), None)
        box = tuple((first, first + size) for first, size in zip(offset, extent, strict=True))
        if module is not None:
            shape = (module.num_experts, *shape[1:])
            box = ((box[0][0] + module.first, box[0][1] + module.first), *box[1:])
        found[name] = Owned(name, shape, box, parameter, module is not None, shard_dim)
    return found


def as_saved(owned: Owned, values: Tensor, ranks: Ranks) -> Tensor:
    """A tensor that tells the save format where ``values`` stand in the whole parameter.

    Args:
        owned: the parameter.
        values: this rank's part of it, or of something of its shape (a moment).
        ranks: this rank's place.

    Returns:
        A DTensor of the whole shape on the mesh (replicate, ep, shard) for expert stacks and on
        (replicate, dense_shard) for the rest; the tensor itself on one rank.
    """
    if ranks.world == 1:
        return values
    if owned.expert:
        within = Replicate() if owned.shard_dim is None else Shard(owned.shard_dim)
        mesh, placements = ranks.state, [Replicate(), Shard(0), within]
    else:
        mesh, placements = ranks.dense, [Replicate(), Shard(owned.shard_dim or 0)]
    stride = torch.empty(owned.shape, device="meta").stride()
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=torch.Size(owned.shape), stride=stride)
