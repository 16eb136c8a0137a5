"""Operator fusions: matched region, providers, variants, and the certificate of legality."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from shardwright.schemas.base import DecimalText, Identifier, Model, NonNegative, Sha256, added
from shardwright.schemas.ops import EvidenceOrigin, OperatorCall

ObligationName = Literal[
    "no-escaping-value",
    "no-mutation-or-alias",
    "no-randomness",
    "dtype-shape-stride-device",
    "tied-weights",
    "hooks",
    "lora-inside",
    "sharding-boundary",
    "reversible-layout",
    "re-trace",
    "differential-test",
]


class Obligation(Model):
    """One thing that must hold for the fusion to be legal, and how it is known."""

    name: ObligationName
    status: Literal["proved", "refuted", "unknown"]
    evidence: str
    """What was looked at and what was seen, in one sentence with numbers."""


class Certificate(Model):
    """The proof of legality of one match. Anything but ``proved`` everywhere means refused."""

    pattern: Identifier
    pattern_version: int
    matched_nodes: tuple[str, ...]
    source_lines: tuple[str, ...]
    bound_constants: dict[str, JsonValue] = {}
    obligations: tuple[Obligation, ...]
    environment: dict[str, str]
    """Versions that the proof depends on."""
    graph_digest: Sha256

    @property
    def legal(self) -> bool:
        return bool(self.obligations) and all(o.status == "proved" for o in self.obligations)

    def refused_because(self) -> str:
        """The obligations that are not proved, in words; empty where legal."""
        if not self.obligations:
            return "no obligation was examined"
        return "; ".join(f"{o.name}: {o.status} ({o.evidence})" for o in self.obligations if o.status != "proved")


class VariantPredicate(Model):
    """When a variant applies; ``None`` means any."""

    ep_min: int = 1
    ep_max: int | None = None
    tp_max: int | None = 1
    packing: tuple[str, ...] = ("plain",)
    lora_inside: bool | None = None
    device_types: tuple[Literal["cuda", "cpu"], ...] = ("cuda",)
    base_formats: tuple[Literal["compute", "fp8", "mxfp4", "int4"], ...] | None = added(None)
    """Formats of the frozen base in device memory; ``packing`` is that of the files."""


class Gain(Model):
    """What a provider's time is, beside eager, for one occurrence on the target device."""

    provider: Identifier
    time_ms: NonNegative
    eager_ms: NonNegative
    floor_ms: NonNegative
    speedup: NonNegative
    origin: EvidenceOrigin
    basis: str
    """Where the numbers come from: result file and date, or formula and calibration."""
    evidence: tuple[Sha256, ...] = added(())
    """Files of the user's own that measured times come from, by hash; those that come with the package have none."""
    calls: tuple[OperatorCall, ...] = added(())
    """The calls of our operators that ``time_ms`` is the sum of; empty for other providers, and in plans that were made
    before calls were kept."""


class Variant(Model):
    """One way to run the region."""

    name: Identifier
    provider: Identifier
    """``shardwright``, ``compile``, ``eager``, or a library's name."""
    op: str
    """Registered operator name (``rms_norm``) or ``-`` where the provider needs none."""
    predicate: VariantPredicate
    gain: Gain | None = None
    available: bool
    unavailable_because: str = ""
    rival: bool = added(False)
    """A library's way that workers cannot install: ranked to compare, never chosen."""
    unranked_because: str = added("")
    """Why there is no time; empty where there is a gain."""
    way: str = added("")
    """What it does at the recipe's sizes and why, where it has several ways; empty where it has one."""


class Region(Model):
    """Where a pattern matched in the live model."""

    layer_kind: str
    modules: tuple[str, ...]
    """Fully qualified names of all instances."""
    roles: dict[str, str]
    """Role → name relative to the instance (``weight`` → ``weight``; ``norm`` → ``input_layernorm``)."""


class RegionNode(Model):
    """One node of a matched region as a reviewer sees it; ``inputs`` name other nodes of the region."""

    id: str
    kind: Literal["input", "parameter", "op"]
    """``input``: made outside the region."""
    label: str
    """Canonical operator or parameter name."""
    inputs: tuple[str, ...] = ()
    output: str = ""
    """Shape and dtype, ``[24, 64] bfloat16``."""
    source: str = ""


class FusionProposal(Model):
    """A region, its certificate, and the ways to run it, best first."""

    id: Identifier
    pattern: Identifier
    title: str
    region: Region
    certificate: Certificate
    variants: tuple[Variant, ...]
    chosen: Identifier | None
    """Name of the variant proposed for this cluster; ``None`` where the certificate refuses."""
    reason: str
    subgraph: tuple[RegionNode, ...] = added(())
    """The matched operations and what they read, for review; empty where the graph was not at hand."""


class FusionDecision(Model):
    """What workers install: part of the decision hash."""

    proposal_id: Identifier
    pattern: Identifier
    variant: Identifier
    provider: Identifier
    op: str
    modules: tuple[str, ...]
    roles: dict[str, str]
    constants: dict[str, str | int | bool] = {}
    """Reals as decimal text."""
    source_sha256: Sha256 | None = None
    """Hash of the operator's source files; ``None`` for eager."""
    beside: dict[Identifier, Sha256] = added({})
    """Further operators that the region runs, each with the hash of its source files."""
    rejected: bool = False
    reason: str = ""
    tolerance: DecimalText = "0"
    """Largest relative error allowed between fused and unfused on the live model."""
