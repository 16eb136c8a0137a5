"""The adaptation plan: what workers do (decision) and why (evidence), each with its hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError

from shardwright.schemas.base import SCHEMA_VERSION, CountInt, Identifier, Model, NonNegative, Sha256, added
from shardwright.schemas.canonical import pretty_bytes, sha256_of
from shardwright.schemas.cluster import ClusterRef, ClusterSpec
from shardwright.schemas.cost import CostReport
from shardwright.schemas.errors import PlanError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.fusion import FusionDecision, FusionProposal
from shardwright.schemas.llm import LlmRecord
from shardwright.schemas.lora import LoraTarget
from shardwright.schemas.profile import CheckpointFingerprint, CheckpointProfile, WeightsPin
from shardwright.schemas.recipe import Recipe
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.schemas.validation import explain


class DataPin(Model):
    """Hashes of the data files a plan was made for."""

    train_sha256: Sha256
    held_out_sha256: Sha256


class Question(Model):
    """Something that rules could not decide; a plan with an open question cannot be approved."""

    id: Identifier
    text: str
    choices: tuple[str, ...]
    answer: str | None = None


class Edit(Model):
    """One change that made a child plan from its parent."""

    field: str
    old: JsonValue
    new: JsonValue
    reason: str
    actor: str


class RemoteCode(Model):
    """Code that came with the checkpoint and that its user named by hash; workers run it and no other."""

    sha256: Sha256
    """Over names and hashes of all code files."""
    files: dict[str, Sha256]
    """Path in the checkpoint → hash."""


class Decision(Model):
    """What workers do. Integers, booleans and strings only."""

    parent_hash: Sha256 | None = None
    model_type: str
    architecture: str
    checkpoint: CheckpointFingerprint
    weights: WeightsPin | None = added(None)
    """What the weights' values are; ``None`` in plans that were made before values were pinned."""
    data: DataPin
    recipe: Recipe
    cluster: ClusterRef
    strategy: ParallelStrategy
    lora_targets: tuple[LoraTarget, ...]
    fusions: tuple[FusionDecision, ...]
    questions: tuple[Question, ...] = ()
    environment: dict[str, str]
    """Versions that workers must have: ``python`` (minor), ``torch``, ``transformers``, ``shardwright``."""
    remote_code: RemoteCode | None = added(None)
    """``None``: nothing from the checkpoint is executed."""
    edits: tuple[Edit, ...] = ()


class Alternative(Model):
    """A rival strategy and why it lost."""

    strategy: ParallelStrategy
    step_ms: NonNegative
    reserved_bytes: CountInt
    gpu_hours: NonNegative
    feasible: bool
    pareto: bool
    """On the front of step time, memory and GPU-hours."""
    lost_because: str
    fused_step_ms: NonNegative | None = added(None)
    """With the fused operators that its mesh and base format admit; ``None`` where the plan's strategies have none.
    Where given, ``lost_because`` and ``pareto`` compare strategies with their own, and ``feasible`` means both ways."""
    fused_reserved_bytes: CountInt | None = added(None)
    """As ``fused_step_ms``."""

    @property
    def as_run(self) -> tuple[float, int]:
        """Step time in ms and reserved bytes with its own fused operators, where they are known."""
        if self.fused_step_ms is None or self.fused_reserved_bytes is None:
            return self.step_ms, self.reserved_bytes
        return self.fused_step_ms, self.fused_reserved_bytes


class SearchRecord(Model):
    """How the strategy was found."""

    sampler: str
    seed: CountInt
    trials: CountInt
    legal_strategies: CountInt
    feasible_strategies: CountInt
    oracle_step_ms: NonNegative
    """Best of the exhaustive scan; 0 where nothing fits."""
    study_step_ms: NonNegative
    """Best the study found by itself."""
    versions: dict[str, str]
    fused_feasible_strategies: CountInt | None = added(None)
    """How many fit with the fused operators that each may have; ``None`` where none may have any."""


class PlainCost(Model):
    """Two figures of a strategy that runs no fused operator."""

    step_ms: NonNegative
    reserved_bytes: CountInt


class EvidenceFile(Model):
    """A file of measured times that fusions were ranked by, beside the times that come with the package."""

    sha256: Sha256
    times: CountInt
    """Of the cluster's device, at the sources that the installed operators have: these were believed."""
    stale: dict[Identifier, CountInt] = {}
    """Operator → times of this device at other sources than it has now, with none at these in their place: ignored."""
    elsewhere: CountInt = 0
    """Times of other devices: ignored."""


class Provenance(Model):
    """Which tools made the plan. No clock, no host."""

    shardwright: str
    versions: dict[str, str]
    llm: str = "off"
    llm_record: LlmRecord | None = added(None)
    """What a language model did, said and was refused; ``None`` where none was asked."""
    cluster_digest: Sha256
    recipe_digest: Sha256
    calibration_digest: Sha256 | None = None
    evidence_files: tuple[EvidenceFile, ...] = added(())
    """The user's own measured times; of two files that time the same, the later one was believed."""
    graph_digest: Sha256


Millionths = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]*)(,(0|[1-9][0-9]*))*$")]
"""Shares of a whole as ``812000,40000,148000``: one line of a plan for one layer."""


class Evidence(Model):
    """Why the decision is what it is."""

    profile: CheckpointProfile
    cluster: ClusterSpec
    proposals: tuple[FusionProposal, ...]
    cost: CostReport
    alternatives: tuple[Alternative, ...]
    plain: PlainCost | None = added(None)
    """The chosen strategy without its fused operators, as the search priced all; ``None`` where it has none."""
    search: SearchRecord
    provenance: Provenance
    explanation: tuple[str, ...] = ()
    expert_loads: tuple[Millionths, ...] = added(())
    """For each MoE layer, in the model's order, the share of rows that each expert got; where the plan was made with a
    load profile. An edit places experts by them."""


class PlanHashes(Model):
    decision: Sha256
    evidence: Sha256


class AdaptationPlan(Model):
    """A whole plan file."""

    schema_version: Literal[1] = 1
    decision: Decision
    evidence: Evidence
    hashes: PlanHashes

    @classmethod
    def seal(cls, decision: Decision, evidence: Evidence) -> AdaptationPlan:
        """Build a plan whose hashes cover its sections as they will be written."""
        hashes = PlanHashes(
            decision=sha256_of(decision.model_dump(mode="json"), floats=False),
            evidence=sha256_of(evidence.model_dump(mode="json")),
        )
        return cls(decision=decision, evidence=evidence, hashes=hashes)

    def to_bytes(self) -> bytes:
        """The file: canonical values, sorted keys, readable."""
        return pretty_bytes(self)

    def save(self, path: Path) -> None:
        """Write the plan under a temporary name, then rename."""
        write_atomic(path, self.to_bytes())


def parse_plan(data: bytes, *, where: str) -> AdaptationPlan:
    """Read plan bytes, verifying version, schema and both hashes.

    Raises:
        PlanError: ``unreadable``, ``schema-version``, ``invalid``, ``decision-edited`` or
            ``evidence-edited``; the two hashes found and recorded are named.
    """
    try:
        raw: Any = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(
            "unreadable",
            f"not a JSON document: {error}",
            where=where,
            next_action="make the plan again with `shardwright plan`",
        ) from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise PlanError(
            "schema-version",
            f"schema_version is {version!r}; this program reads {SCHEMA_VERSION}",
            where=where,
            next_action="make the plan again with `shardwright plan`: a plan of another version is never run",
        )
    try:
        plan = AdaptationPlan.model_validate_json(data)
    except ValidationError as error:
        raise PlanError(
            "invalid",
            explain(error),
            where=where,
            next_action="do not edit plans by hand; use `shardwright review` to make a child plan",
        ) from error
    for section, floats in (("decision", False), ("evidence", True)):
        found = sha256_of(raw[section], floats=floats)
        recorded = getattr(plan.hashes, section)
        if found != recorded:
            raise PlanError(
                f"{section}-edited",
                f"the {section} section hashes to {found[:16]}…, the file records {recorded[:16]}…",
                where=where,
                next_action="restore the file, or make a child plan with `shardwright review` and approve that",
            )
    return plan


def load_plan(path: Path) -> AdaptationPlan:
    """``parse_plan`` on a file."""
    if not path.is_file():
        raise PlanError("missing", "no such plan file", where=str(path), next_action="make one with `shardwright plan`")
    return parse_plan(path.read_bytes(), where=str(path))
