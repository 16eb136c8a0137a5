"""What happened in a run: measured beside predicted, checks, the adapter."""

from __future__ import annotations

from typing import Literal

from shardwright.schemas.base import CountInt, Model, NonNegative, Sha256, added
from shardwright.schemas.log_head import LogHead

CheckStage = Literal["load", "step", "export"]


class CheckResult(Model):
    """One check and its evidence."""

    stage: CheckStage
    name: str
    passed: bool
    evidence: str
    """Both sides of the comparison, with numbers."""
    scope: Literal["whole_model", "by_layer", "local"] = "whole_model"


class StepMetric(Model):
    """One line of metrics.jsonl: one optimizer step."""

    step: CountInt
    loss: float
    grad_norm: NonNegative
    learning_rate: NonNegative
    tokens: CountInt
    seconds: NonNegative
    peak_memory_bytes: CountInt
    expert_load_max_over_mean: NonNegative = 0.0
    balance_loss: float = added(0.0)
    """The balancing losses as they joined the gradient, summed over layers and ranks."""
    indexer_loss: float = added(0.0)
    """The same of the sparse attentions' indexers."""


class EvalMetric(Model):
    """Held-out loss at a step (0 = the base model)."""

    step: CountInt
    loss: float
    tokens: CountInt


class LoadFacts(Model):
    """How the weights were read."""

    bytes_read: CountInt
    seconds: NonNegative
    tensors: CountInt
    peak_host_bytes: CountInt
    readers: CountInt = added(0)
    """Threads that read ahead on this rank."""
    staging_bytes: CountInt = added(0)
    """Host memory of their buffers."""


class ExpertLoad(Model):
    """Tokens routed to each expert of one layer over the run."""

    layer: str
    tokens: tuple[CountInt, ...]


class WayTaken(Model):
    """Which way an operator with several ran the rows of one length, and why."""

    op: str
    path: str
    """``dense`` or ``sparse``."""
    row_tokens: CountInt
    modules: tuple[str, ...]
    reason: str
    """What decided while it ran."""
    planned: str
    """The decision's reason, which the plan was approved with."""


class AdapterFacts(Model):
    """The exported adapter."""

    path: str
    format: Literal["peft"]
    tensors: CountInt
    bytes: CountInt
    sha256: Sha256


class ExportFacts(Model):
    """Another form of the adapter that was written beside the PEFT one."""

    path: str
    format: Literal["per_expert", "merged"]
    tensors: CountInt
    bytes: CountInt
    sha256: Sha256
    """Of the weights file, or of the index of a sharded checkpoint."""
    retained_delta: NonNegative | None = None
    """Smallest share of an adapted weight's change that is left after the base's packing; 1 where nothing is packed."""


class PreflightResult(Model):
    """One test before the run: what was expected and found. It is no calibration: plans do not name it."""

    name: str
    passed: bool
    where: str
    """Rank or node that the result is about."""
    evidence: str
    value: float | None = None
    unit: str = ""


class RunRecord(Model):
    """The whole run. Written by rank 0, completed by the export and check stages.

    While it runs, ``steps`` and ``evaluations`` stand in metrics.jsonl alone.
    """

    schema_version: Literal[1] = 1
    decision_sha256: Sha256
    evidence_sha256: Sha256
    status: Literal["running", "trained", "exported", "failed", "interrupted"]
    world_size: CountInt
    device: str
    versions: dict[str, str]
    load: LoadFacts | None = None
    steps: tuple[StepMetric, ...] = ()
    evaluations: tuple[EvalMetric, ...] = ()
    expert_loads: tuple[ExpertLoad, ...] = ()
    checks: tuple[CheckResult, ...] = ()
    adapter: AdapterFacts | None = None
    measured_step_ms: NonNegative | None = None
    measured_peak_bytes: CountInt | None = None
    predicted_step_ms: NonNegative | None = None
    predicted_peak_bytes: CountInt | None = None
    resumed_from_steps: tuple[CountInt, ...] = ()
    stopped_at_step: CountInt | None = added(None)
    """Where the recipe's early stop ended the run before its last step."""
    allocator: str = added("")
    """What torch's allocator of device memory was told by the environment; empty: nothing, or no CUDA device."""
    ways: tuple[WayTaken, ...] = added(())
    """Of operators with several ways, which ran: sparse attention over all keys or over selected ones."""
    exports: tuple[ExportFacts, ...] = ()
    preflight: tuple[PreflightResult, ...] = ()
    approvals: LogHead | None = added(None)
    """How far the approvals log reached when the run last started: a later start refuses a log without these lines."""
    warnings: tuple[str, ...] = ()
    """Decisions that were taken while it ran, each with its cause: a damaged save passed over, another mesh."""
    failure: str = ""
