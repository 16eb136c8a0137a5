"""The arithmetic inside an experts block, in a spelling that can be traced.

Classes of the library offer a batched spelling of their loop over experts. A class without one whose weights have the
usual names gets the library's batched spelling; whether its own loop computes the same, the certificate tests. Any
other class shows its own loop, over all experts. A table of whole modules shows one of them: all experts of a block are
alike.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardwright.agents.structure.opaque import ExpertsCall
from shardwright.agents.structure.opaque_loops import unrolled

_CHOICE = "_experts_implementation_internal"
_USUAL = ("gate_up_proj", "down_proj")
_ROUTED_VALUES = 3


@dataclass(frozen=True)
class Body:
    """What is traced to see inside an experts block."""

    module: nn.Module
    """Traced with its forward as it is while :meth:`spelled` is open."""
    path: str
    """Relative to the experts module; not empty where one expert of a table stands for all."""
    values: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    """Keyword names of the values; empty where they are passed by position."""

    @contextmanager
    def spelled(self) -> Iterator[None]:
        """The batched spelling, or the unrolled loop, while open."""
        config = getattr(self.module, "config", None)
        if self.path:
            yield
        elif hasattr(self.module, "has_gate") and config is not None and hasattr(config, _CHOICE):
            before = getattr(config, _CHOICE)
            try:
                setattr(config, _CHOICE, "batched_mm")
                yield
            finally:
                setattr(config, _CHOICE, before)
        elif _lacks_batched(self.module, self.values):
            with _lent(self.module):
                yield
        else:
            with unrolled(self.module):
                yield


def body_of(call: ExpertsCall) -> Body:
    """How to trace the inside of an experts block."""
    module, names = call.module, () if call.leading else call.names
    if isinstance(module, (nn.ModuleDict, nn.ModuleList)):
        name, expert = next(iter(module.named_children()))
        return Body(expert, name, call.values[:1], ())
    return Body(module, "", call.values, names)


def _lacks_batched(module: nn.Module, values: tuple[torch.Tensor, ...]) -> bool:
    """A loop over experts with weights of the usual names and layout, and no batched spelling of its own."""
    stacks = [getattr(module, name, None) for name in _USUAL]
    routed = len(values) == _ROUTED_VALUES and not values[1].is_floating_point()
    if not routed or not all(isinstance(stack, nn.Parameter) and stack.dim() == _ROUTED_VALUES for stack in stacks):
        return False
    return hasattr(module, "act_fn") or hasattr(module, "_apply_gate")


@contextmanager
def _lent(module: nn.Module) -> Iterator[None]:
    """The library's batched forward on a module that has none; everything is taken away again."""
    from transformers.integrations import moe

    facts: dict[str, Any] = {
        "num_experts": module.get_parameter("down_proj").shape[0],
        "has_gate": True,
        "has_bias": False,
        "is_transposed": False,
        "is_concatenated": True,
        "has_post_expert_norm": False,
        "_is_expert_parallel": False,
        "forward": MethodType(moe.batched_mm_experts_forward, module),
    }
    if not hasattr(module, "_apply_gate"):
        facts["_apply_gate"] = MethodType(_gate, module)
    before = {name: module.__dict__[name] for name in facts if name in module.__dict__}
    try:
        module.__dict__.update(facts)
        yield
    finally:
        for name in facts:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)


def _gate(module: Any, merged: torch.Tensor) -> torch.Tensor:
    gate, up = merged.chunk(2, dim=-1)
    result: torch.Tensor = module.act_fn(gate) * up
    return result
