"""Pipeline stages. The cost model and the runtime cover one stage."""

from __future__ import annotations

from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Axis, Draws, Violation
from shardwright.search_spaces.context import SearchContext


def _choices(context: SearchContext, draws: Draws) -> tuple[int, ...]:
    return (1,)


def _check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    layers, stages = context.profile.shape.num_layers, strategy.mesh.pp
    if stages <= layers:
        return ()
    return (
        Violation(
            rule="stage-has-a-layer",
            message=f"pp {stages} is more than the model's {layers} layers: a stage would be empty",
            nearest_legal=(str(layers),),
        ),
    )


AXIS = Axis("pp", _choices, lambda s: s.mesh.pp, _check)
