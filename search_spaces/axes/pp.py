"""Pipeline stages: equally many layers on each, the last may have fewer."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.context import SearchContext, divisors


def _filled(layers: int, stages: int) -> bool:
    """Whether ``ceil(layers / stages)`` layers a stage leave none empty."""
    each = -(-layers // stages)
    return stages <= layers and (stages - 1) * each < layers


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    layers = context.profile.shape.num_layers
    return tuple(d for d in divisors(context.world) if _filled(layers, d))


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    layers, stages = context.profile.shape.num_layers, strategy.mesh.pp
    if _filled(layers, stages):
        return ()
    legal = [d for d in range(1, layers + 1) if _filled(layers, d)]
    return (
        Violation(
            rule="stage-has-a-layer",
            message=f"pp {stages} on the model's {layers} layers: a stage would be empty",
            nearest_legal=(str(min(legal, key=lambda d: (abs(d - stages), d))),),
        ),
    )


AXIS = Axis("pp", _choices, lambda s: s.mesh.pp, _check)
