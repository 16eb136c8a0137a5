"""Proposals: every match with its certificate and its variants, each operation claimed once."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.agents.structure.canonical import CanonicalGraph
from shardwright.agents.structure.capture import CapturedGraph
from shardwright.agents.structure.certify import certify
from shardwright.agents.structure.choose import settle
from shardwright.agents.structure.facts import ModelFacts
from shardwright.agents.structure.patterns import PATTERNS, Match
from shardwright.agents.structure.rank import Target, variants
from shardwright.schemas.fusion import FusionProposal, Region
from shardwright.schemas.strategy import Mesh

Pairs = Iterable[tuple[CapturedGraph, CanonicalGraph | None]]


def find_matches(pairs: Pairs) -> tuple[Match, ...]:
    """All matches of all patterns, in the order of graphs, patterns and nodes."""
    return tuple(
        match
        for captured, canonical in pairs
        if canonical is not None
        for pattern in PATTERNS
        for match in pattern.find(captured, canonical)
    )


def propose(matches: tuple[Match, ...], facts: ModelFacts, target: Target) -> tuple[FusionProposal, ...]:
    """Certify and rank every match; choices are for a mesh without expert parallelism until the join."""
    taken: dict[str, int] = {}
    made = []
    for match in matches:
        name = f"{match.pattern.name}:{match.captured.kind}:{match.label}"
        taken[name] = taken.get(name, 0) + 1
        made.append(_proposal(match, name if taken[name] == 1 else f"{name}-{taken[name]}", facts, target))
    return settle(tuple(made), target.cluster, Mesh())


def _proposal(match: Match, name: str, facts: ModelFacts, target: Target) -> FusionProposal:
    modules = match.modules()
    adapted = any(parameter in facts.adapted for parameter in match.all_parameters())
    return FusionProposal(
        id=name,
        pattern=match.pattern.name,
        title=f"{match.pattern.title} at {match.label}, {len(modules)} place{'s' if len(modules) != 1 else ''}",
        region=Region(layer_kind=match.captured.kind, modules=modules, roles=match.roles),
        certificate=certify(match, facts),
        variants=variants(match, target, adapted=adapted),
        chosen=None,
        reason="not chosen yet",
    )
