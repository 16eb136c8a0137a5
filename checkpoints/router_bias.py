"""Where a family keeps the bias that picks experts: added to the scores for the choice, never to the weights.

It lies in the router or in the MoE block itself, as a buffer [E]; a family that keeps it as a parameter, or elsewhere,
is not known here, and its bias stays as it is.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from shardwright.checkpoints.build import build_on_meta
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.recipe import BalanceSpec

NAMES = ("e_score_correction_bias", "expert_bias")
ROUTERS = ("gate", "router")


def router_bias(model: nn.Module, experts: str, num_experts: int) -> str | None:
    """Full name of the buffer that picks for an experts module; ``None`` where there is none.

    Args:
        experts: full name of the module.
        num_experts: E over all ranks.
    """
    block = experts.rpartition(".")[0]
    for holder in (*(f"{block}.{router}" if block else router for router in ROUTERS), block):
        module = _module(model, holder)
        for name in NAMES:
            value = module._buffers.get(name) if module is not None else None
            if isinstance(value, Tensor) and value.numel() == num_experts:
                return f"{holder}.{name}" if holder else name
    return None


def check_balance(folder: Path, balance: BalanceSpec) -> None:
    """:func:`require_router_biases` for a checkpoint; nothing is built where the biases stay.

    Raises:
        RecipeError: ``balance-bias``.
        CheckpointError: as ``build_on_meta``.
    """
    if balance.bias != "frozen":
        require_router_biases(build_on_meta(folder, torch.bfloat16), balance)


def require_router_biases(model: nn.Module, balance: BalanceSpec) -> None:
    """Refuse a recipe that moves biases which the model does not have.

    Args:
        model: the checkpoint's, on meta, as its class makes it.

    Raises:
        RecipeError: ``balance-bias``.
    """
    if balance.bias == "frozen":
        return
    stacks = {
        name: [value.shape[0] for value in module._parameters.values() if value is not None and value.dim() == 3]
        for name, module in model.named_modules()
    }
    experts = {name: sizes[0] for name, sizes in stacks.items() if len(sizes) >= 2}
    without = [name for name, size in experts.items() if router_bias(model, name, size) is None]
    if without or not experts:
        raise no_bias(balance.bias, without, type(model).__name__)


def no_bias(wanted: str, layers: list[str], model: str) -> RecipeError:
    """The refusal, for the model's class and the layers that lack a bias."""
    found = f"{len(layers)} MoE layers, first {layers[0]}, have" if layers else "it has no stacked experts with"
    return RecipeError(
        "balance-bias",
        f"recipe.balance.bias is {wanted}, but in {model} {found} no buffer {' or '.join(NAMES)}",
        where="recipe.balance.bias",
        next_action="leave recipe.balance.bias at frozen; use auxiliary or sequence where something trains",
    )


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
