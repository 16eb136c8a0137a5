"""Which part of each parameter this rank keeps, in coordinates of the whole parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.experts.placement import Slots, regroup, runs_of, spans
from shardwright.runtime.lora.inject import is_adapter
from shardwright.runtime.lora.stack import LoraStack
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
        slots: the expert in each place, where a plan places experts; dim 0 of ``box`` counts places then.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    parameter: nn.Parameter
    expert: bool
    shard_dim: int | None
    slots: Slots | None = None

    @property
    def adapter(self) -> bool:
        return is_adapter(self.name)

    @property
    def numbers(self) -> tuple[int, ...]:
        """What each row of dim 0 is: a place in the whole parameter; for a stack the number of its expert."""
        rows = range(*self.box[0])
        return tuple(rows) if self.slots is None else tuple(self.slots[row] for row in rows)

    def parts(self) -> tuple[Box, ...]:
        """The boxes of the whole parameter, in its own order, that make up this rank's part from its first row on."""
        if self.slots is None:
            return (self.box,)
        return tuple(((first, stop), *self.box[1:]) for _, first, stop in runs_of(self.numbers))

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        return torch.cat([whole[tuple(slice(*extent) for extent in box)] for box in self.parts()])

    @property
    def copied(self) -> bool:
        """Whether some expert of this stack is held more than once."""
        return self.slots is not None and len(self.slots) > self.shape[0]

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
    stacked = (LoraExperts, LoraStack)
    experts = {name: module for name, module in model.named_modules() if isinstance(module, stacked)}
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
        slots = None if module is None else module.slots
        found[name] = Owned(name, shape, box, parameter, module is not None, shard_dim, slots)
    return found


def as_saved(owned: Owned, values: Tensor, ranks: Ranks) -> Tensor:
    """A tensor that tells the save format where ``values`` stand in the whole parameter.

    Args:
        owned: the parameter.
        values: this rank's part of it, or of something of its shape (a moment).
        ranks: this rank's place.

    Returns:
        A DTensor of the whole shape on the mesh (replicate, ep, shard) for expert stacks and on
        (replicate, dense_shard) for the rest; the tensor itself on one rank. Placed experts come in a copy, in their
        own order, and every rank of a replica takes part; what lives on the host comes in a copy on the device.
    """
    if ranks.world == 1:
        return values
    values = by_expert(owned, values.to(owned.parameter.device), ranks)
    if owned.expert:
        within = Replicate() if owned.shard_dim is None else Shard(owned.shard_dim)
        mesh, placements = ranks.state, [Replicate(), Shard(0), within]
    else:
        mesh, placements = ranks.dense, [Replicate(), Shard(owned.shard_dim or 0)]
    stride = torch.empty(owned.shape, device="meta").stride()
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=torch.Size(owned.shape), stride=stride)


def by_expert(owned: Owned, values: Tensor, ranks: Ranks, *, add: bool = False) -> Tensor:
    """This rank's share of ``values`` with experts in their own order; itself where they stand so.

    Args:
        add: sum over an expert's copies; else its first copy's.
    """
    if owned.slots is None:
        return values
    have, want, me, group = _members(owned, owned.slots, ranks)
    return regroup(values, have, want, me, group, add=add)


def by_place(owned: Owned, values: Tensor, ranks: Ranks) -> Tensor:
    """What :func:`by_expert` gave, in this rank's places again; an expert's copies all get it."""
    if owned.slots is None:
        return values
    have, want, me, group = _members(owned, owned.slots, ranks)
    return regroup(values, want, have, me, group)


def _members(owned: Owned, slots: Slots, ranks: Ranks) -> tuple[list[Slots], list[Slots], int, dist.ProcessGroup]:
    """Experts of each rank of a group by place and in their own order, this rank's position, and the group.

    FSDP on another dim than experts leaves each EP group to itself.
    """
    ep, shards = ranks.sizes.ep, ranks.expert_shards if owned.shard_dim == 0 else 1
    have = [tuple(slots[row] for row in span) for span in spans(len(slots), ep, shards)]
    want = [tuple(span) for span in spans(owned.shape[0], ep, shards)]
    if shards > 1:
        cp = ranks.sizes.cp
        order = [(s * cp + c) * ep + e for s in range(ranks.sizes.shard) for e in range(ep) for c in range(cp)]
        have, want = [have[at] for at in order], [want[at] for at in order]
        return have, want, dist.get_rank(ranks.owner_group), ranks.owner_group
    return have, want, ranks.ep_rank, ranks.ep_group


def sum_copies(adapters: dict[str, Owned], ranks: Ranks) -> None:
    """Give every copy of an expert the sum of all copies' adapter gradients, in place; after backward, once."""
    for owned in adapters.values():
        if not owned.copied:
            continue
        gradient = owned.local_grad()
        mine = torch.zeros_like(owned.local()) if gradient is None else gradient
        summed = by_place(owned, by_expert(owned, mine, ranks, add=True), ranks)
        if gradient is not None:
            gradient.copy_(summed)


def counted_once(owned: Owned, values: Tensor) -> Tensor:
    """``values`` with zeros for an expert's further copies: what a sum over ranks may count."""
    if owned.slots is None or not owned.copied:
        return values
    seen = [owned.slots.index(owned.slots[row]) == row for row in range(*owned.box[0])]
    kept = torch.tensor(seen, device=values.device).view(-1, *[1] * (values.dim() - 1))
    return values * kept
