"""FSDP2 as the plan says: one unit a decoder layer, one for its experts, one for the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from shardwright.checkpoints.components import component_of
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.experts.packed import cut_dims
from shardwright.runtime.mesh import Ranks
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.recipe import PrecisionSpec
from shardwright.schemas.strategy import ParallelStrategy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LAYER_LISTS = ("layers", "blocks", "h")
"""Names under which models keep their decoder layers."""


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name → decoder layer: the entries of the longest list of layers outside a vision tower.

    Raises:
        LegalityError: ``no-layers``.
    """
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and name.rsplit(".", 1)[-1] in LAYER_LISTS
        and component_of(f"{name}.0", 2) != "vision"
    }
    if not lists:
        raise LegalityError(
            "no-layers",
            "the model has no list of decoder layers",
            where=type(model).__name__,
            next_action="add its name to runtime/parallelize.py",
        )
    best = max(lists, key=lambda name: len(lists[name]))
    return {f"{best}.{index}": layer for index, layer in lists[best].named_children()}


def shard(
    model: nn.Module, strategy: ParallelStrategy, precision: PrecisionSpec, ranks: Ranks, domain: int = 0
) -> None:
    """Wrap the model on meta. Groups of one rank are not wrapped.

    Gradients are summed, not averaged: the loss is already divided by the tokens of the whole batch. With averages an
    expert's gradient, which all ranks of its EP group reach through the dispatch, would come out ep times too large
    beside the dense ones.

    A unit with packed stacks is gathered in the formats that it is stored in: FSDP would cast codes as numbers. Where a
    rank keeps weights whole anyway (replicas alone, or ``ep`` alone for experts), frozen ones are left out: a group of
    one would still copy each unit in every pass. What is trained stays in, for its gradient's sum.

    Side tensors that stay fp32 beside a bf16 base (``checkpoints/precision.py``) are whole on every rank: a gather
    would cast them.

    Args:
        domain: neighbouring ranks that reach each other without a network card, for a plan that reshards inside it.

    Raises:
        LegalityError: ``reshard-scope``, ``no-layers``.
    """
    dense, expert_mesh = ranks.dense_fsdp(), ranks.expert_fsdp()
    if dense is None:
        return
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.base] if precision.base != precision.adapter else None,
        reduce_dtype=DTYPES[precision.reduce],
        cast_forward_inputs=False,
    )
    of_dense, of_experts = reshard_ranks(strategy, domain)
    layers = list(decoder_layers(model).values())
    whole = kept_whole(model, precision)
    if ranks.dense_shards == 1:
        whole |= frozen_dense(model)
    units: list[list[FSDPModule]] = []
    for layer in layers:
        inner = [module for module in layer.modules() if isinstance(module, LoraExperts)]
        for experts in inner:
            if expert_mesh is None:
                whole.update(experts.parameters())
            else:
                packed = cut_dims(experts, ranks.expert_shards)
                fully_shard(
                    experts,
                    mesh=expert_mesh,
                    shard_placement_fn=partial(expert_placement, shards=ranks.expert_shards, packed=packed),
                    reshard_after_forward=of_experts,
                    mp_policy=replace(policy, param_dtype=None) if packed else policy,
                    ignored_params=frozen(experts) if ranks.expert_shards == 1 else None,
                )
        fully_shard(layer, mesh=dense, ignored_params=whole, reshard_after_forward=of_dense, mp_policy=policy)
        units.append([layer, *(inner if expert_mesh is not None else [])])  # type: ignore[list-item]
    fully_shard(model, mesh=dense, ignored_params=whole, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _prefetch(units, strategy.prefetch_depth)


def kept_whole(model: nn.Module, precision: PrecisionSpec) -> set[nn.Parameter]:
    """Frozen parameters outside expert stacks that are wider than the base."""
    base = DTYPES[precision.base].itemsize
    return {one for one in frozen_dense(model) if one.is_floating_point() and one.dtype.itemsize > base}


def frozen(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of a module that are not trained."""
    return {value for value in module.parameters() if not value.requires_grad}


def frozen_dense(model: nn.Module) -> set[nn.Parameter]:
    """Frozen parameters outside expert stacks."""
    stacks = {value for module in model.modules() if isinstance(module, LoraExperts) for value in module.parameters()}
    return frozen(model) - stacks


def reshard_ranks(strategy: ParallelStrategy, domain: int) -> tuple[bool | int, bool | int]:
    """Over how many ranks (dense weights, expert stacks) are spread after forward: all, none, or those of a domain.

    Ranks that shard one EP rank's experts stand ep apart, so a domain holds ``domain / ep`` of them; where that is one,
    expert weights stay whole until backward.

    Raises:
        LegalityError: ``reshard-scope`` where domains do not divide the group.
    """
    everywhere = strategy.reshard_after_forward
    if strategy.reshard_scope != "node" or not everywhere:
        return everywhere, everywhere
    shards, ep = strategy.mesh.shard, strategy.mesh.ep
    if strategy.mesh.cp > 1:
        raise LegalityError(
            "reshard-scope",
            f"cp {strategy.mesh.cp}: groups inside a node are not formed where sequences are cut",
            where="decision.strategy.reshard_scope",
            next_action="choose reshard_scope all",
        )
    if domain < 2 or shards * ep <= domain or (shards * ep) % domain or (domain % ep and ep % domain):
        raise LegalityError(
            "reshard-scope",
            f"{shards * ep} ranks share the weights, {ep} the experts; domains of {domain} do not divide them evenly",
            where="decision.strategy.reshard_scope",
            next_action="choose reshard_scope all",
        )
    return domain, domain // ep if domain > ep else False


def expert_placement(parameter: nn.Parameter, shards: int, packed: dict[nn.Parameter, int]) -> Shard:
    """The dim on which FSDP cuts a local stack [L, …]: experts while each rank gets one, else a dim that divides.

    A packed stack's dims are given: values and scales are cut at the same places.
    """
    if parameter in packed:
        return Shard(packed[parameter])
    if parameter.shape[0] >= shards:
        return Shard(0)
    return Shard(next((dim for dim in (1, 2) if dim < parameter.dim() and parameter.shape[dim] % shards == 0), 0))


def _prefetch(units: list[list[FSDPModule]], depth: int) -> None:
    """Depth 1 is FSDP2's own order; deeper plans name the units to gather ahead."""
    if depth <= 1:
        return
    for index, unit in enumerate(units):
        ahead = [module for later in units[index + 1 : index + 1 + depth] for module in later]
        behind = [module for earlier in reversed(units[max(0, index - depth) : index]) for module in earlier]
        unit[0].set_modules_to_forward_prefetch(ahead)
        unit[0].set_modules_to_backward_prefetch(behind)
