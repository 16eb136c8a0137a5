"""Which layers are recomputed, where only some are: a count of each kind, spread evenly over its layers."""

from __future__ import annotations

from shardwright.schemas.profile import LayerKind
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.axes.base import Trial, Violation
from shardwright.search_spaces.context import SearchContext

NAME = "checkpointed_layers"


def spread(kind: LayerKind, count: int) -> tuple[int, ...]:
    """``count`` of a kind's layers, as far apart as they can be, so that every pipeline stage gets its share."""
    layers = kind.layer_indices
    return tuple(layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count))


def layers_of(kinds: tuple[LayerKind, ...], counts: tuple[int, ...]) -> tuple[int, ...]:
    """Layer indices, ascending, for a count of each kind."""
    return tuple(sorted(i for kind, count in zip(kinds, counts, strict=True) for i in spread(kind, count)))


def counts_of(kinds: tuple[LayerKind, ...], layers: tuple[int, ...]) -> tuple[int, ...]:
    """How many layers of each kind are among ``layers``."""
    return tuple(len(set(kind.layer_indices) & set(layers)) for kind in kinds)


def parameter(kind: LayerKind) -> str:
    """The trial parameter of one kind's count."""
    return f"{NAME}:{kind.name}"


def draw(trial: Trial, context: SearchContext) -> tuple[int, ...]:
    """A count of each kind through the trial; at least one layer, of the kind with most layers."""
    kinds = context.profile.layer_kinds
    largest = max(range(len(kinds)), key=lambda i: (len(kinds[i].layer_indices), -i))
    counts = tuple(
        trial.suggest_int(parameter(kind), int(i == largest), len(kind.layer_indices)) for i, kind in enumerate(kinds)
    )
    return layers_of(kinds, counts)


def check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    """Every named layer exists."""
    layers = context.profile.shape.num_layers
    beyond = [index for index in strategy.checkpointed_layers if index >= layers]
    if not beyond:
        return ()
    message = f"checkpointed layer {beyond[0]} of a model of {layers} layers"
    return (Violation(rule="layer-exists", message=message, nearest_legal=(str(layers - 1),)),)
