"""What a certificate must know about the live model: hooks, tied weights, adapters, FSDP units, versions."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwright.schemas.lora import LoraTarget

_MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


@dataclass(frozen=True)
class ModelFacts:
    """Observations of one model, made before it is traced."""

    module_hooks: dict[str, str] = field(default_factory=dict)
    """Module path → kinds of hooks on it."""
    parameter_hooks: dict[str, str] = field(default_factory=dict)
    global_hooks: tuple[str, ...] = ()
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Parameter → other names of the same storage."""
    adapted: dict[str, str] = field(default_factory=dict)
    """Parameter → role of the LoRA target on it."""
    units: tuple[str, ...] = ()
    """Module paths of FSDP units: the decoder layers; everything else belongs to the root."""
    environment: dict[str, str] = field(default_factory=dict)

    def unit_of(self, name: str) -> str:
        """The FSDP unit of a module or parameter; empty for the root."""
        return next((unit for unit in self.units if name == unit or name.startswith(unit + ".")), "")


def observe(
    model: nn.Module, units: Iterable[str], targets: Iterable[LoraTarget], tied: Iterable[tuple[str, str]] = ()
) -> ModelFacts:
    """Look at a model on meta.

    Args:
        units: module paths of the decoder layers.
        targets: resolved LoRA targets of the recipe.
        tied: pairs of names that the checkpoint's profile says are one weight.
    """
    hooks = {}
    for path, module in model.named_modules():
        kinds = [name.strip("_") for name in _MODULE_HOOKS if getattr(module, name, None)]
        if kinds:
            hooks[path] = ", ".join(kinds)
    on_parameters, names = {}, dict[int, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        kinds = [k for k in ("_backward_hooks", "_post_accumulate_grad_hooks") if getattr(parameter, k, None)]
        if kinds:
            on_parameters[name] = ", ".join(k.strip("_") for k in kinds)
    groups = [set(group) for group in names.values() if len(group) > 1] + [set(pair) for pair in tied]
    together: dict[str, tuple[str, ...]] = {}
    for group in groups:
        for name in group:
            together[name] = tuple(sorted({*together.get(name, ()), *group} - {name}))
    present = torch.nn.modules.module
    return ModelFacts(
        module_hooks=hooks,
        parameter_hooks=on_parameters,
        global_hooks=tuple(n.strip("_") for n in _GLOBAL_HOOKS if getattr(present, n, None)),
        tied=together,
        adapted={target.parameter: target.role for target in targets},
        units=tuple(units),
        environment=versions(),
    )


def versions() -> dict[str, str]:
    """Versions that a proof depends on; no machine names, no times."""
    import transformers

    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
    }
