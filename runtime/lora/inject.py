"""Adapters and local experts into a model on meta, before anything is sharded."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from shardwright.checkpoints.layouts import expert_layout
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.dense_block import sparse_forward
from shardwright.runtime.experts.hierarchical import Nodes
from shardwright.runtime.experts.module import LoraExperts, check_call
from shardwright.runtime.experts.packed import Packing
from shardwright.runtime.experts.placement import Slots
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.runtime.lora.router import adapt_router
from shardwright.runtime.lora.separate import reach_every_expert
from shardwright.runtime.lora.shared import SUFFIX, SharedPairs
from shardwright.runtime.lora.stack import LoraStack, takes_sizes
from shardwright.runtime.mesh import Ranks
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.lora import LoraTarget

ADAPTER_SUFFIXES = ("lora_a", "lora_b")


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return name.endswith(ADAPTER_SUFFIXES)


def freeze(model: nn.Module) -> None:
    """No base parameter gets a gradient."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold stacked experts: two or more own parameters of three dims."""
    found = {}
    for name, module in model.named_modules():
        stacks = [value for value in module._parameters.values() if value is not None and value.dim() == 3]
        if len(stacks) >= 2:
            found[name] = module
    return found


def inject(
    model: nn.Module,
    targets: tuple[LoraTarget, ...],
    *,
    model_type: str,
    ranks: Ranks,
    meter: LoadMeter,
    dropout: float,
    dtype: torch.dtype,
    packed: dict[str, Packing] | None = None,
    chunks: int = 1,
    nodes: Nodes | None = None,
    slots: tuple[Slots, ...] = (),
    padding: int = 1,
) -> None:
    """Freeze the base; put local experts and adapters in place.

    Args:
        model: on meta.
        targets: the plan's.
        model_type: family, which decides how experts are stored.
        ranks: this rank's place.
        meter: counts rows per expert.
        dropout: on the adapters of dense weights.
        dtype: format of adapters.
        packed: experts modules whose stacks stay packed.
        chunks: pieces in which experts exchange their rows.
        nodes: of the EP group, where rows travel in two stages.
        slots: the expert in each place of each MoE layer, in the model's order; empty where the plan places none.
        padding: multiple of rows that each local expert gets.

    Raises:
        LegalityError: ``target-missing`` when the plan names a weight that the model lacks,
            ``target-shape`` when its sizes differ; ``experts-call``, ``experts-not-divisible``,
            ``unknown-expert-layout``, ``expert-slots``, ``ep-needs-stacks``, ``router-adapter``.
    """
    freeze(model)
    by_module: dict[str, list[LoraTarget]] = defaultdict(list)
    for target in targets:
        by_module[target.module].append(target)
    found = find_experts(model)
    if ranks.sizes.ep > 1 and not found:
        raise LegalityError(
            "ep-needs-stacks",
            f"ep {ranks.sizes.ep}: the experts of {type(model).__name__} do not lie in stacks that ranks can share out",
            where="decision.strategy.mesh",
            next_action="choose a plan with ep = 1",
        )
    placed: dict[str, Slots] = {}
    if slots:
        _require_as_many(slots, found)
        placed = dict(zip(found, slots, strict=True))
    for name, original in found.items():
        if ranks.sizes.ep == 1 and name not in by_module and not supported(original, name, model_type):
            continue
        group = ranks.ep_group if ranks.sizes.ep > 1 else None
        layout = expert_layout(model_type)
        packing = (packed or {}).get(name)
        experts = LoraExperts(
            *(original, name, layout, ranks.sizes.ep, ranks.ep_rank, group, meter, packing, chunks, nodes),
            slots=placed.get(name) if group is not None else None,
            padding=padding,
        )
        shared = SharedPairs()
        for target in by_module.pop(name, []):
            _adapt_stack(experts, shared, dict(original.named_parameters(recurse=False)), target, dtype)
        replace(model, name, experts)
        if experts.shared:
            replace(model, f"{name}{SUFFIX}", shared)
        if experts.weigh_inputs:
            block = model.get_submodule(name.rpartition(".")[0])
            block.forward = sparse_forward(block)
    for name, wanted in by_module.items():
        linear = _submodule(model, name)
        if linear is not None and takes_sizes(linear):
            _put_stack(model, name, linear, wanted[0], meter, dtype)
            continue
        target = wanted[0]
        if linear is not None and target.role == "router" and type(linear) is not nn.Linear:
            adapt_router(linear, name, target.rank, float(target.scaling), dtype)
            continue
        if not isinstance(linear, nn.Linear) or len(wanted) != 1:
            raise _missing(target, f"{name} is {type(linear).__name__}, expected one adapted Linear")
        _check(target, (target.out_features, target.in_features), tuple(linear.weight.shape))
        replace(model, name, LoraLinear(linear, target.rank, float(target.scaling), dropout, dtype))
    reach_every_expert(model, targets, meter)


def _put_stack(
    model: nn.Module, name: str, linear: nn.Module, target: LoraTarget, meter: LoadMeter, dtype: torch.dtype
) -> None:
    """An adapted stack in the place of a linear that holds one."""
    stack, shared = LoraStack(linear, name, meter), SharedPairs()
    _adapt_stack(stack, shared, dict(linear.named_parameters(recurse=False)), target, dtype)
    replace(model, name, stack)
    if stack.shared:
        replace(model, f"{name}{SUFFIX}", shared)


def _require_as_many(slots: tuple[Slots, ...], layers: dict[str, nn.Module]) -> None:
    if len(slots) != len(layers):
        raise LegalityError(
            "expert-slots",
            f"the plan places the experts of {len(slots)} layers, the model has {len(layers)} with experts",
            where="decision.strategy.expert_slots",
            next_action="plan again with --load-profile of a run of this model",
        )


def supported(experts: nn.Module, name: str, model_type: str) -> bool:
    """Whether this runtime can run these experts itself; untouched ones it need not."""
    try:
        check_call(experts, name)
        expert_layout(model_type)
    except LegalityError:
        return False
    return True


def _adapt_stack(
    experts: LoraExperts | LoraStack,
    shared: SharedPairs,
    stacks: dict[str, nn.Parameter],
    target: LoraTarget,
    dtype: torch.dtype,
) -> None:
    stack = target.parameter.rsplit(".", 1)[1]
    weight = stacks.get(stack)
    if weight is None:
        raise _missing(target, f"{target.module} has no stack {stack!r}")
    size = (target.out_features, target.in_features)
    expected = (target.num_experts, *(size if target.layout == "out_in" else size[::-1]))
    _check(target, expected, (experts.num_experts, *weight.shape[1:]))
    lead = () if target.shared else (experts.local,)
    a = nn.Parameter(torch.empty((*lead, target.rank, target.in_features), dtype=dtype, device=weight.device))
    b = nn.Parameter(torch.empty((*lead, target.out_features, target.rank), dtype=dtype, device=weight.device))
    if target.shared:
        shared.add(stack, a, b)
        experts.share_adapter(stack, shared, float(target.scaling))
    else:
        experts.add_adapter(stack, a, b, float(target.scaling))


def adapter_names(target: LoraTarget) -> tuple[str, str]:
    """Names of a target's A and B parameters in the training model."""
    stem = f"{target.module}." if target.kind == "dense" else f"{target.parameter}_"
    if target.shared:
        stem = f"{target.module}{SUFFIX}.{target.parameter.rsplit('.', 1)[1]}_"
    return f"{stem}lora_a", f"{stem}lora_b"


def adapter_shapes(target: LoraTarget) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Whole shapes of a target's A and B."""
    lead = (target.num_experts,) if target.kind == "experts" and not target.shared else ()
    return (*lead, target.rank, target.in_features), (*lead, target.out_features, target.rank)


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in another's place."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _missing(target: LoraTarget, what: str) -> LegalityError:
    return LegalityError(
        "target-missing",
        what,
        where=f"decision.lora_targets: {target.parameter}",
        next_action="make the plan again for this checkpoint with `shardwright plan`",
    )


def _check(target: LoraTarget, planned: tuple[int, ...], found: tuple[int, ...]) -> None:
    if planned != found:
        raise LegalityError(
            "target-shape",
            f"the plan says {list(planned)}, the model has {list(found)}",
            where=f"decision.lora_targets: {target.parameter}",
            next_action="make the plan again for this checkpoint with `shardwright plan`",
        )
