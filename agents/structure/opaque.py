"""Leaves of a capture: an experts call, and the place of a decoder layer, each one node.

An experts block has four spellings (grouped, batched, fallback, eager loop), and the loop cannot be captured at all
because its length depends on the data. As one node it looks the same in every spelling; its arithmetic is captured
apart, as a graph of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

NAMESPACE = "shardwright_capture"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_LIBRARY.define("experts(Tensor[] values, Tensor[] parameters) -> Tensor")
_LIBRARY.define("layer(Tensor hidden, int index) -> Tensor")
_LIBRARY.define("side(Tensor place, int[] shape, ScalarType dtype, int index) -> Tensor")
_LIBRARY.impl("experts", lambda values, parameters: torch.empty_like(values[0]), "Meta")
_LIBRARY.impl(
    "side",
    lambda place, shape, dtype, index: torch.empty(shape, dtype=dtype, device="meta"),
    "Meta",
)
_LIBRARY.impl("layer", lambda hidden, index: torch.empty_like(hidden), "Meta")


STACK_RANK = 3
_ENOUGH = 2


def is_experts(module: nn.Module) -> bool:
    """Whether a module is an experts block: told by what it holds, and by its class's name where that says nothing.

    It holds two or more stacks of weights itself (``[E, out, in]``), or has two or more children that each hold
    nothing but one stack, or is a list or table of like children with a forward of its own.
    """
    own = [p for p in module.parameters(recurse=False) if p.dim() == STACK_RANK]
    if len(own) >= _ENOUGH:
        return True
    children = list(module.children())
    if sum(_is_stack(child) for child in children) >= _ENOUGH:
        return True
    if isinstance(module, (nn.ModuleDict, nn.ModuleList)):
        return _overrides_forward(module) and len(children) >= _ENOUGH and len({type(c) for c in children}) <= _ENOUGH
    return type(module).__name__.endswith("Experts") and next(module.parameters(), None) is not None


def _is_stack(module: nn.Module) -> bool:
    """A module that holds one stack of weights and no child."""
    own = list(module.parameters(recurse=False))
    return len(own) == 1 and own[0].dim() == STACK_RANK and not list(module.children()) and not _is_convolution(module)


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def _overrides_forward(module: nn.Module) -> bool:
    return type(module).forward not in (nn.ModuleDict.forward, nn.ModuleList.forward, nn.Module.forward)


def outermost_experts(layer: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """Experts blocks of a layer, each with its path; none lies inside another."""
    found: list[tuple[str, nn.Module]] = []
    for path, module in layer.named_modules():
        inside = any(path.startswith(outer + ".") for outer, _ in found)
        if path and not inside and is_experts(module):
            found.append((path, module))
    return tuple(found)


@dataclass
class ExpertsCall:
    """How one experts module was called while its layer was captured."""

    path: str
    """Relative to the layer."""
    module: nn.Module
    names: tuple[str, ...]
    """Argument names of the class's forward that got tensors, in order."""
    leading: bool
    """Whether these are its first arguments, so that they can be passed by position."""
    values: tuple[torch.Tensor, ...]
    """Meta tensors: what the layer passes, by position."""


@dataclass
class OpaqueExperts:
    """The experts modules of one layer, replaced by one node each while the context is open."""

    layer: nn.Module
    calls: dict[str, ExpertsCall] = field(default_factory=dict)

    @contextmanager
    def installed(self) -> Iterator[OpaqueExperts]:
        replaced: list[nn.Module] = []
        try:
            for path, module in outermost_experts(self.layer):
                module.__dict__["forward"] = self._opaque(path, module)
                replaced.append(module)
            yield self
        finally:
            for module in replaced:
                del module.__dict__["forward"]

    def _opaque(self, path: str, module: nn.Module) -> Any:
        signature = inspect.signature(type(module).forward)

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            bound = signature.bind(module, *args, **kwargs).arguments
            given = [(name, value) for name, value in list(bound.items())[1:] if isinstance(value, torch.Tensor)]
            names = tuple(name for name, _ in given)
            leading = names == tuple(signature.parameters)[1 : len(names) + 1]
            values = tuple(like_meta(value) for _, value in given)
            self.calls[path] = ExpertsCall(path, module, names, leading, values)
            result: torch.Tensor = torch.ops.shardwright_capture.experts(
                [value for _, value in given], list(module.parameters())
            )
            return result

        return forward


def like_meta(value: torch.Tensor) -> torch.Tensor:
    """An empty meta tensor of the same sizes, strides and dtype, free of any tracing context."""
    sizes, strides = [int(s) for s in value.shape], [int(s) for s in value.stride()]
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
