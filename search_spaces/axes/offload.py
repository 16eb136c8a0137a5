"""What lives in host memory between uses."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.context import SearchContext

VALUES = ("none", "adapter_optimizer", "activations", "frozen_experts")


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    if context.cluster.device.type == "cpu":
        return ("none",)
    return VALUES if context.experts else VALUES[:-1]


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    if strategy.offload in _choices(context, {}):
        return ()
    on_cpu = context.cluster.device.type == "cpu"
    reason = "a CPU rank's memory is host memory already" if on_cpu else "the model has no experts"
    return (
        Violation(
            rule="offload-needs-device-memory",
            message=f"offload {strategy.offload}: {reason}",
            nearest_legal=("none",),
        ),
    )


AXIS = Axis("offload", _choices, lambda s: s.offload, _check, encoding="categorical", fixed=VALUES)
