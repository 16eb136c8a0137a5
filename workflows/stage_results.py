"""What stages return, as the workflow reads it: protocols, so that no room has to be imported for them."""

from __future__ import annotations

from typing import Protocol

from shardwright.schemas.cost import CostReport
from shardwright.schemas.fusion import FusionDecision, FusionProposal
from shardwright.schemas.graph import OpGraph
from shardwright.schemas.plan import Alternative, SearchRecord
from shardwright.schemas.strategy import ParallelStrategy


class StructureResult(Protocol):
    """What structure parsing returns."""

    @property
    def graph(self) -> OpGraph: ...
    @property
    def proposals(self) -> tuple[FusionProposal, ...]: ...


class SearchResult(Protocol):
    """What strategy search returns."""

    @property
    def best(self) -> ParallelStrategy: ...
    @property
    def cost(self) -> CostReport: ...
    @property
    def alternatives(self) -> tuple[Alternative, ...]: ...
    @property
    def record(self) -> SearchRecord: ...
    @property
    def explanation(self) -> tuple[str, ...]: ...


class FusedSearch(Protocol):
    """What the search finds when strategies are priced with their fused operators."""

    @property
    def strategies(self) -> tuple[ParallelStrategy, ...]: ...
    @property
    def feasible(self) -> int: ...


class Reranked(Protocol):
    """What ranking by the cost as run returns."""

    @property
    def chosen(self) -> int: ...
    @property
    def alternatives(self) -> tuple[Alternative, ...]: ...
    @property
    def explanation(self) -> tuple[str, ...]: ...


class Violation(Protocol):
    """A broken rule of legality."""

    @property
    def rule(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def nearest_legal(self) -> tuple[str, ...]: ...


Proposals = tuple[FusionProposal, ...]

Decisions = tuple[FusionDecision, ...]


def told(violation: Violation) -> str:
    """A broken rule in words."""
    return f"{violation.rule}: {violation.message} (nearest legal: {', '.join(violation.nearest_legal) or 'none'})"
