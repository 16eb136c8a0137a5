"""Which variant a region gets, and which of two overlapping regions gives way.

Two rules, used for the cluster before a mesh is known and again for the chosen mesh.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.agents.structure.patterns import PATTERNS
from shardwright.schemas.cluster import ClusterSpec
from shardwright.schemas.fusion import FusionProposal, Variant
from shardwright.schemas.strategy import Mesh
from shardwright.search_spaces.executable import CONTEXT_OPERATORS

MODEL_TIE = 1.1
"""Ratio of modelled times within which they count as equal."""

_OWN, _EAGER = "shardwright", "eager"
_CUT = CONTEXT_OPERATORS | {"kda", "gated_delta"}
"""Operators that run on cut sequences; of a delta rule only the whole layer does."""
_WHOLE_ROWS = frozenset({"delta_rule"})
"""Patterns whose region would meet a rank's own tokens alone."""
_SPANNING = frozenset(pattern.name for pattern in PATTERNS if pattern.spans_modules)
_FOUND_ONLY = frozenset(
    pattern.name for pattern in PATTERNS if all(v.provider == _EAGER or v.not_installable for v in pattern.variants())
)
"""Regions that workers can only run eagerly: they are shown and ranked, and give way to every other region."""


@dataclass(frozen=True)
class Choice:
    """A variant and why; no variant where nothing may run but the model as it is."""

    variant: Variant | None
    reason: str


def fits(variant: Variant, mesh: Mesh, device_type: str, base_format: str = "compute") -> str:
    """Why a variant does not apply on a mesh with a base kept in a format; empty where it does."""
    if variant.rival:
        return variant.unavailable_because or f"{variant.provider} is ranked to compare, not installed"
    if not variant.available:
        return variant.unavailable_because
    rule = variant.predicate
    if device_type not in rule.device_types:
        return f"needs {' or '.join(rule.device_types)}"
    if mesh.ep < rule.ep_min or (rule.ep_max is not None and mesh.ep > rule.ep_max):
        return f"not for ep {mesh.ep}"
    if rule.tp_max is not None and mesh.tp > rule.tp_max:
        return f"not for tp {mesh.tp}"
    if mesh.cp > 1 and variant.provider != _EAGER and variant.op not in _CUT:
        return f"runs whole sequences; cp {mesh.cp} cuts them"
    if rule.base_formats is not None and base_format not in rule.base_formats:
        return f"needs the base kept as {' or '.join(rule.base_formats)}; here it is {base_format}"
    return ""


def choose(proposal: FusionProposal, cluster: ClusterSpec, mesh: Mesh, base_format: str = "compute") -> Choice:
    """The variant for one legal region.

    On a CPU cluster regions stay eager: compiling costs tens of seconds, which a run of CPU size does not earn back.
    On CUDA the fastest available variant is taken, eager where nothing is faster.
    """
    if not proposal.certificate.legal:
        return Choice(None, f"refused: {proposal.certificate.refused_because()}")
    usable = [v for v in proposal.variants if not fits(v, mesh, cluster.device.type, base_format)]
    if mesh.cp > 1 and proposal.pattern in _WHOLE_ROWS:
        usable = [v for v in usable if v.provider == _EAGER]
    eager = next((v for v in usable if v.provider == _EAGER), None)
    if eager is None:
        return Choice(None, "no variant applies on this mesh: " + _why_not(proposal, cluster, mesh, base_format))
    best = fastest(tuple(v for v in usable if v.provider != _EAGER))
    if best is None or best.gain is None:
        unused = _why_not(proposal, cluster, mesh, base_format)
        return Choice(eager, f"eager: nothing else applies ({unused})" if unused else "eager: nothing else exists yet")
    gain = best.gain
    text = f"{gain.eager_ms:.3g} → {gain.time_ms:.3g} ms a call ({gain.origin}), ×{gain.speedup:.2f}"
    if cluster.device.type == "cpu":
        return Choice(eager, f"eager: {best.name} would give {text}, but compile time is not repaid on a CPU cluster")
    if gain.speedup <= 1.0:
        return Choice(eager, f"eager: {best.name} is not faster ({text})")
    return Choice(best, f"{best.name}: {text}" + (f"; {best.way}" if best.way else ""))


def fastest(variants: tuple[Variant, ...]) -> Variant | None:
    """The variant with the least time.

    Counted work cannot tell times apart that lie within ``MODEL_TIE``; there our kernel goes before a compiled one,
    because its numbers are verified and it needs no compilation in each worker. Two measured times are compared as
    they are.
    """
    timed = [(v.gain.time_ms, v.name, v) for v in variants if v.gain is not None]
    if not timed:
        return None
    least, _, best = min(timed)
    for time_ms, _, variant in sorted(timed):
        both_measured = all(v.gain is not None and v.gain.origin == "measured" for v in (variant, best))
        if variant.provider == _OWN and time_ms <= least * MODEL_TIE and not both_measured:
            return variant
    return best


def _why_not(proposal: FusionProposal, cluster: ClusterSpec, mesh: Mesh, base_format: str) -> str:
    reasons = [(v.name, fits(v, mesh, cluster.device.type, base_format)) for v in _others(proposal)]
    return "; ".join(f"{name}: {why}" for name, why in reasons if why)


def _others(proposal: FusionProposal) -> tuple[Variant, ...]:
    """What a worker could install in place of eager."""
    return tuple(v for v in proposal.variants if v.provider != _EAGER and not v.rival)


def settle(
    proposals: tuple[FusionProposal, ...], cluster: ClusterSpec, mesh: Mesh, base_format: str = "compute"
) -> tuple[FusionProposal, ...]:
    """Choose for every region, and let each operation be claimed once.

    Of overlapping regions, one with our kernel wins, then one with a compiled variant, then eager. Among our kernels
    the larger region wins; otherwise a region inside one module wins over one that spans modules, then the larger.
    """
    choices = {p.id: choose(p, cluster, mesh, base_format) for p in proposals}
    claimed: dict[tuple[str, str], dict[str, str]] = {}
    settled: dict[str, FusionProposal] = {}
    for proposal in sorted(proposals, key=lambda p: _priority(p, choices[p.id])):
        choice = choices[proposal.id]
        place = (proposal.certificate.graph_digest, proposal.region.layer_kind)
        owners = claimed.setdefault(place, {})
        taken = next((owners[n] for n in proposal.certificate.matched_nodes if n in owners), None)
        if choice.variant is None:
            settled[proposal.id] = proposal.model_copy(update={"chosen": None, "reason": choice.reason})
        elif taken is not None:
            reason = f"superseded by {taken}, which covers the same operations (would be {choice.reason})"
            settled[proposal.id] = proposal.model_copy(update={"chosen": None, "reason": reason})
        else:
            owners.update(dict.fromkeys(proposal.certificate.matched_nodes, proposal.id))
            update = {"chosen": choice.variant.name, "reason": choice.reason}
            settled[proposal.id] = proposal.model_copy(update=update)
    return tuple(settled[p.id] for p in proposals)


def _priority(proposal: FusionProposal, choice: Choice) -> tuple[int, bool, int, str]:
    provider = choice.variant.provider if choice.variant else ""
    rank = 4 if proposal.pattern in _FOUND_ONLY else {_OWN: 0, _EAGER: 2, "": 3}.get(provider, 1)
    spans = proposal.pattern in _SPANNING and provider != _OWN
    return rank, spans, -len(proposal.certificate.matched_nodes), proposal.id
