"""Before sharding: what FSDP reduces together has one format."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.schemas.errors import LegalityError


def require_one_trainable_dtype(units: dict[str, nn.Module], root: nn.Module) -> None:
    """One format of trainable parameters in each unit, and in what is left to the root.

    FSDP reduces a unit's gradients in one buffer; of two formats it would refuse in the first backward, or cast one.

    Args:
        units: name → module that becomes a unit, outer ones first or last alike.
        root: the whole model.

    Raises:
        LegalityError: ``trainable-dtypes``, naming a parameter of each format.
    """
    inside: set[int] = set()
    for name, unit in units.items():
        _require(name, dict(unit.named_parameters(prefix=name)))
        inside.update(id(value) for value in unit.parameters())
    _require("the root", {name: value for name, value in root.named_parameters() if id(value) not in inside})


def _require(unit: str, parameters: dict[str, nn.Parameter]) -> None:
    first: dict[torch.dtype, str] = {}
    for name, value in parameters.items():
        if value.requires_grad:
            first.setdefault(value.dtype, name)
    if len(first) > 1:
        raise LegalityError(
            "trainable-dtypes",
            " and ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in first.items()),
            where=unit,
            next_action="give everything that trains in this unit one format (recipe.precision.adapter)",
        )
