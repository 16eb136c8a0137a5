"""Activation checkpointing by decoder layer, with the routing of the forward kept.

A recomputed router can choose other experts than the forward did (ties, noise, non-deterministic kernels); the gradient
would then belong to a function that was never evaluated. So the forward keeps what every ``topk`` chose, and the
recomputation takes the same entries of its own scores: same experts, and scores that stay differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.runtime.context import Cut, cutting
from shardwright.runtime.context import active as active_cut
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.routing import Choices, Routes, active, choosing
from shardwright.runtime.segments import Bounds, segments
from shardwright.runtime.segments import active as active_segments
from shardwright.schemas.errors import LegalityError
from shardwright.schemas.strategy import ParallelStrategy

LIBRARY_TOPK: Callable[..., Any] = torch.topk


@dataclass(frozen=True)
class _Call:
    """The arguments of ``torch.topk``, in its own order and under its own names."""

    input: Tensor
    k: int
    dim: int = -1
    largest: bool = True
    sorted: bool = True


def _topk_of(choices: Choices | Routes) -> Callable[..., Any]:
    """``topk`` as a choice and a differentiable look-up of the chosen scores.

    The first pass makes the choices and remembers them in order; a replay takes them as they were. Both passes record
    the same graph, which the checkpoint requires.
    """

    def topk(*args: Any, **kwargs: Any) -> Any:
        call = _Call(*args, **kwargs)
        scores = call.input.shape[call.dim]
        size = (call.input.numel() // max(scores, 1), scores, call.k)
        with torch.no_grad():
            indices = choices.take(size, lambda: LIBRARY_TOPK(*args, **kwargs).indices)
        return torch.return_types.topk((call.input.gather(call.dim, indices), indices))

    return topk


@contextmanager
def _topk(replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside the block ``torch.topk`` and ``Tensor.topk`` are another function.

    A ``TorchFunctionMode`` would do the same and slow every other call down: under one, each access to a tensor's
    shape or dtype goes through Python, about a thousand of them in a layer.
    """
    before = torch.topk, Tensor.__dict__.get("topk")
    torch.topk = replacement
    Tensor.topk = replacement  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.topk = before[0]
        if before[1] is None:
            del Tensor.topk
        else:
            Tensor.topk = before[1]  # type: ignore[method-assign]


class CheckpointedForward:
    """Runs a layer's own forward under a checkpoint while gradients are on."""

    def __init__(self, layer: nn.Module, meter: LoadMeter) -> None:
        self.original: Callable[..., Any] = layer.forward
        self.meter = meter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        return checkpoint(self.original, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        around = active()
        choices = Choices(outer=around if isinstance(around, Routes) else None)
        return routed(choices), self._again(choices, active_segments(), active_cut())

    @contextmanager
    def _again(self, choices: Choices, bounds: Bounds | None, cut: Cut | None) -> Iterator[None]:
        with self.meter.record(False), segments(bounds), cutting(cut), routed(choices.again()):
            yield


@contextmanager
def routed(choices: Choices | Routes) -> Iterator[None]:
    """One pass of a layer or a model: every ``topk`` and every fused router keeps or repeats its choice."""
    with choosing(choices), _topk(_topk_of(choices)):
        yield


def recomputed(layers: list[nn.Module], strategy: ParallelStrategy) -> list[nn.Module]:
    """The decoder layers that a plan recomputes: none, all, or those that it names.

    Raises:
        LegalityError: ``checkpointed-layers`` where it names a layer that the model has not.
    """
    if strategy.checkpointing != "layers":
        return layers if strategy.checkpointing == "full" else []
    if strategy.checkpointed_layers[-1] >= len(layers):
        raise LegalityError(
            "checkpointed-layers",
            f"the plan recomputes layer {strategy.checkpointed_layers[-1]}, the model has {len(layers)}",
            where="decision.strategy.checkpointed_layers",
            next_action="make the plan again for this checkpoint",
        )
    return [layers[index] for index in strategy.checkpointed_layers]


def checkpoint_layers(layers: list[nn.Module], meter: LoadMeter) -> None:
    """Checkpoint each layer; call before ``fully_shard``, so that its hooks stay outside."""
    for layer in layers:
        layer.forward = CheckpointedForward(layer, meter)
