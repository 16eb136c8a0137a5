"""The join: proposals re-certified for the chosen mesh, and the decisions that workers install."""

from __future__ import annotations

from shardwright.agents.structure.choose import fits, settle
from shardwright.agents.structure.patterns import PATTERNS
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.fusion import Certificate, FusionDecision, FusionProposal, Obligation, Variant
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy

_PATTERNS = {pattern.name: pattern for pattern in PATTERNS}


def recertify(
    proposals: tuple[FusionProposal, ...], strategy: ParallelStrategy, cluster: ClusterSpec, recipe: Recipe
) -> tuple[tuple[FusionProposal, ...], tuple[FusionDecision, ...]]:
    """Check every variant's predicate against mesh and base format, choose again, and make decisions.

    What was refuted stays refuted: only the sharding obligation depends on the mesh, and it can only get stricter.

    Returns:
        The proposals with their final choice, and one decision for each chosen one, in the same order.
    """
    checked = tuple(_for_strategy(proposal, strategy, cluster) for proposal in proposals)
    settled = settle(checked, cluster, strategy.mesh, strategy.base_format)
    return settled, tuple(_decision(proposal) for proposal in settled if proposal.chosen is not None)


def _for_strategy(proposal: FusionProposal, strategy: ParallelStrategy, cluster: ClusterSpec) -> FusionProposal:
    """The proposal with its sharding obligation examined for one mesh and format of the base."""
    mesh, kind = strategy.mesh, cluster.device.type
    open_variants = [v.name for v in proposal.variants if not fits(v, mesh, kind, strategy.base_format)]
    renewed = []
    for obligation in proposal.certificate.obligations:
        if obligation.name == "sharding-boundary" and obligation.status == "proved":
            renewed.append(_sharding(obligation, open_variants, mesh))
        else:
            renewed.append(obligation)
    certificate = Certificate.model_validate(
        {**proposal.certificate.model_dump(), "obligations": [o.model_dump() for o in renewed]}
    )
    return proposal.model_copy(update={"certificate": certificate})


def _sharding(obligation: Obligation, open_variants: list[str], mesh: Mesh) -> Obligation:
    base = obligation.evidence.split(" | mesh ", 1)[0]
    if not open_variants:
        evidence = f"{base} | mesh {mesh.text()}: no variant's predicate holds"
        return obligation.model_copy(update={"status": "refuted", "evidence": evidence})
    evidence = f"{base} | mesh {mesh.text()}: {', '.join(open_variants)}"
    return obligation.model_copy(update={"evidence": evidence})


def _decision(proposal: FusionProposal) -> FusionDecision:
    variant = next(v for v in proposal.variants if v.name == proposal.chosen)
    return FusionDecision(
        proposal_id=proposal.id,
        pattern=proposal.pattern,
        variant=variant.name,
        provider=variant.provider,
        op=variant.op,
        modules=proposal.region.modules,
        roles=proposal.region.roles,
        constants=decision_constants(proposal),
        source_sha256=_source(variant),
        beside=_beside(proposal, variant),
        reason=proposal.reason,
        tolerance="0" if variant.provider == "eager" else _PATTERNS[proposal.pattern].tolerance,
    )


def decision_constants(proposal: FusionProposal) -> dict[str, str | int | bool]:
    """Bound constants as a decision may hold them: reals as decimal text."""
    constants: dict[str, str | int | bool] = {}
    for name, value in proposal.certificate.bound_constants.items():
        if isinstance(value, float):
            constants[name] = decimal_text(value)
        elif isinstance(value, (bool, int, str)):
            constants[name] = value
    return constants


def decimal_text(value: float) -> str:
    """``1e-05`` as ``0.00001``: the shortest text that reads back the same, without an exponent."""
    from decimal import Decimal

    return format(Decimal(repr(value)).normalize(), "f")


def _beside(proposal: FusionProposal, variant: Variant) -> dict[str, str]:
    """Further operators of the region, which its certificate names, each with the hash of its source."""
    if variant.provider != "shardwright":
        return {}
    from shardwright.kernels.registry import source_sha256

    named = str(proposal.certificate.bound_constants.get("operators", "")).split()
    return {op: source_sha256(op) for op in named if op != variant.op}


def _source(variant: Variant) -> str | None:
    if variant.provider != "shardwright":
        return None
    from shardwright.kernels.registry import source_sha256

    return source_sha256(variant.op)
