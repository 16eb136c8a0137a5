"""A certificate for a match: every obligation examined, with evidence, bound to the graph it was proved on."""

from __future__ import annotations

from shardwright.agents.structure.facts import ModelFacts
from shardwright.agents.structure.obligations import examine
from shardwright.agents.structure.patterns.base import Match
from shardwright.schemas.fusion import Certificate


def certify(match: Match, facts: ModelFacts) -> Certificate:
    """Examine one match.

    Args:
        match: what a pattern claims.
        facts: the live model as it was before it was traced.
    """
    lines = dict.fromkeys(node.source for node in match.region.op_nodes if node.source)
    return Certificate(
        pattern=match.pattern.name,
        pattern_version=match.pattern.version,
        matched_nodes=match.region.canonical_ids,
        source_lines=tuple(lines),
        bound_constants=match.constants,
        obligations=examine(match, facts),
        environment=facts.environment,
        graph_digest=match.region.canonical.digest,
    )
