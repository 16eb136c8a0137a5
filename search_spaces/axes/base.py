"""The shape of an axis: its legal values given earlier choices, and its legality rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from shardwright.schemas.base import Identifier, Model
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.executable import Value

Draws = Mapping[str, Any]
"""Values chosen so far, by axis name."""


class Violation(Model):
    """One broken rule."""

    rule: Identifier
    message: str
    """What was found, with its numbers."""
    nearest_legal: tuple[str, ...] = ()
    """The closest values that the rule allows, nearest first."""


class Trial(Protocol):
    """What an axis needs of a search trial."""

    def suggest_int(self, name: str, low: int, high: int) -> int: ...

    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


@dataclass(frozen=True)
class Axis:
    """One axis of the space.

    ``choices`` gives every legal value that follows the earlier draws, the default first;
    ``check`` judges a whole strategy; ``read`` takes the axis value out of one.
    ``encoding``: ``index`` draws a position in the legal values (a metric axis), ``categorical`` draws among
    ``fixed`` values, which never change between trials. ``refines``: the exhaustive scan of the explored
    space keeps this axis at its default; the study and the refinement after it choose it.
    """

    name: str
    choices: Callable[[SearchContext, Draws], tuple[Value, ...]]
    read: Callable[[ParallelStrategy], Value]
    check: Callable[[SearchContext, ParallelStrategy], tuple[Violation, ...]]
    encoding: Literal["index", "categorical"] = "index"
    fixed: tuple[Value, ...] = ()
    refines: bool = False

    def draw(self, trial: Trial, allowed: tuple[Value, ...]) -> Value:
        """Take one of ``allowed`` through the trial; a single value is not drawn."""
        if len(allowed) == 1:
            return allowed[0]
        if self.encoding == "categorical" and allowed == self.fixed:
            return trial.suggest_categorical(self.name, list(self.fixed))
        return allowed[trial.suggest_int(f"{self.name}_index", 0, len(allowed) - 1)]


def no_rule(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
    """For axes whose values are legal on every model."""
    return ()


def draws_of(strategy: ParallelStrategy) -> dict[str, Any]:
    """A whole strategy as draws, for rules that are choices."""
    return {name: value for name, value in (*strategy, *strategy.mesh) if name != "mesh"}


def among(rule: str, axis: str, choices: Callable[[SearchContext, Draws], tuple[Value, ...]]) -> Any:
    """The check of an axis whose legal values are exactly its choices."""

    def check(context: SearchContext, strategy: ParallelStrategy) -> tuple[Violation, ...]:
        draws = draws_of(strategy)
        legal, value = choices(context, draws), draws[axis]
        if value in legal:
            return ()
        return (
            Violation(
                rule=rule,
                message=f"{axis} = {value} does not go with {strategy.mesh.text()} on this model and cluster",
                nearest_legal=tuple(str(one) for one in legal[:3]),
            ),
        )

    return check


def gathers(draws: Draws) -> bool:
    """Whether any weight is spread over more than one rank by FSDP."""
    return bool(draws["shard"] * draws["ep"] * draws.get("cp", 1) > 1)


def exchanges(draws: Draws) -> bool:
    """Whether routed rows move between ranks."""
    return bool(draws["ep"] > 1)


def runs_cut(context: SearchContext, draws: Draws) -> bool:
    """Whether sequences are cut over ranks by the runtime, which then forms no groups inside nodes."""
    return bool(draws.get("cp", 1) > 1) and not context.explore


def inner_ranks(draws: Draws) -> int:
    """Neighbouring ranks that tensor and context parallelism take."""
    return int(draws.get("tp", 1) * draws.get("cp", 1))


def whole_domains(context: SearchContext, draws: Draws, ranks: int) -> bool:
    """Whether a group of neighbouring ranks is several whole load/store domains, with several of its ranks in each."""
    inside = max(1, context.domain // inner_ranks(draws))
    return ranks > inside > 1 and ranks % inside == 0
