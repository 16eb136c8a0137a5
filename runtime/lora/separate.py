"""Adapters on experts that are modules of their own, in blocks that call only those which got tokens.

An adapter that is not called leaves no gradient, and FSDP would sum other parameters on other ranks. So the block's
output is made to depend on all of its experts' adapters, with gradients of zero. The block sorts its rows itself: ep is
1. Rows of each expert are counted where its first adapted linear is called.
Legend: E experts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.schemas.lora import LoraTarget

OWN_MODULE = re.compile(r"^(?P<experts>(?:.*\.)?experts)\.(?P<index>\d+)\.")
"""A linear of one expert: the list of experts, and which one."""


def expert_of(name: str) -> tuple[str, int] | None:
    """(list of experts, number) of a module or parameter inside one expert's own module."""
    match = OWN_MODULE.match(name)
    return (match["experts"], int(match["index"])) if match else None


class _Reached(torch.autograd.Function):
    """The output as it is; zero gradients for adapters that it does not depend on."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *adapters: Tensor) -> Tensor:
        ctx.like = [(one.shape, one.dtype, one.device) for one in adapters]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        return (gradients[0], *zeros)


def reach_every_expert(model: nn.Module, targets: tuple[LoraTarget, ...], meter: LoadMeter) -> None:
    """Make every block with adapted experts of their own modules reach all of them, and count their rows."""
    linears: dict[str, dict[int, list[LoraLinear]]] = defaultdict(lambda: defaultdict(list))
    for target in targets:
        place = expert_of(target.parameter) if target.kind == "dense" else None
        if place is not None:
            linears[place[0]][place[1]].append(model.get_submodule(target.module))  # type: ignore[arg-type]
    for name, of_expert in linears.items():
        experts = len(model.get_submodule(name)._modules)
        for index, mine in of_expert.items():
            mine[0].register_forward_pre_hook(_counting(meter, name, index, experts))
        every = [linear for mine in of_expert.values() for linear in mine]
        model.get_submodule(name.rpartition(".")[0]).register_forward_hook(_reaching(every))


def _counting(meter: LoadMeter, name: str, index: int, experts: int) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if meter.recording:
            counts = torch.zeros(experts, dtype=torch.int64, device=args[0].device)
            counts[index] = args[0].shape[:-1].numel()
            meter.add(name, counts)

    return hook


def _reaching(linears: list[LoraLinear]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        adapters = [half for linear in linears for half in (linear.lora_a, linear.lora_b)]
        if isinstance(output, tuple):
            return (_Reached.apply(output[0], *adapters), *output[1:])
        return _Reached.apply(output, *adapters)

    return hook
