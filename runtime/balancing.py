"""The recipe's balancing on a run's models: losses on the live and the plain one, biases that move on the live one."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.runtime.device import Device
from shardwright.runtime.experts.auxiliary import Balancer, require_something_upstream
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.experts.bias import RouterBiases
from shardwright.runtime.experts.module import LoraExperts
from shardwright.runtime.mesh import Ranks
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.plan import AdaptationPlan


def balancer_for(plan: AdaptationPlan, model: nn.Module, meter: LoadMeter, rows_have_planes: bool) -> Balancer | None:
    """The losses on the live model; ``None`` where the recipe has none.

    Raises:
        RecipeError: ``balance-frozen-router``, ``balance-documents``.
        LegalityError: ``balance-router``.
    """
    if not plan.decision.recipe.balance.active:
        return None
    if rows_have_planes:
        raise RecipeError(
            "balance-documents",
            "a sequence of several documents, or with padding, is no group to balance over",
            where="recipe.balance",
            next_action="use packed texts without document masks, or set both coefficients to 0",
        )
    layers = tuple(
        name for name, module in model.named_modules() if isinstance(module, LoraExperts) and not module.weigh_inputs
    )
    require_something_upstream(model, layers)
    return put_on(plan, model, layers, meter)


def biases_for(plan: AdaptationPlan, model: nn.Module, meter: LoadMeter) -> RouterBiases | None:
    """The biases that the recipe moves; ``None`` where they are frozen.

    Raises:
        RecipeError: ``balance-bias``.
        LegalityError: ``balance-router``.
    """
    spec = plan.decision.recipe.balance
    if spec.bias == "frozen":
        return None
    layers = {name: module.num_experts for name, module in model.named_modules() if isinstance(module, LoraExperts)}
    return RouterBiases(model, layers, spec, meter)


def put_on(plan: AdaptationPlan, model: nn.Module, layers: tuple[str, ...], meter: LoadMeter) -> Balancer:
    """The losses on a model with these experts modules."""
    recipe = plan.decision.recipe
    share = plan.decision.strategy.micro_batch_sequences / recipe.batch.global_batch_sequences
    tokens = recipe.batch.sequence_tokens
    return Balancer(model, layers, recipe.balance, meter, share=share, sequence_tokens=tokens)


class SideLoss(Protocol):
    """A loss beside the text's, whose gradient joins the backward pass by itself."""

    def take(self) -> Tensor | None:
        """The losses since the last call on this rank, as they are scaled; ``None`` where nothing ran."""


def loss_over_ranks(side: SideLoss | None, ranks: Ranks, device: Device) -> float:
    """The losses since the last call, over all ranks."""
    if side is None:
        return 0.0
    mine = side.take()
    total = torch.zeros((), device=device.torch_device) if mine is None else mine
    if ranks.world > 1:
        dist.all_reduce(total)
    return float(total)
