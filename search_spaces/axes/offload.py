"""What lives in host memory between uses."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.context import SearchContext

VALUES = ("none", "adapter_optimizer")


def _choices(context: SearchContext, draws: Draws) -> tuple[str, ...]:
    return VALUES if context.cluster.device.type != "cpu" else ("none",)


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    if strategy.offload in _choices(context, {}):
        return ()
    return (
        Violation(
            rule="offload-needs-device-memory",
            message=f"offload {strategy.offload}: a CPU rank's memory is host memory already",
            nearest_legal=("none",),
        ),
    )


AXIS = Axis("offload", _choices, lambda s: s.offload, _check, encoding="categorical", fixed=VALUES)
