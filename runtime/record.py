"""run.json: what happened, kept current by rank 0 and completed by export and its check.

While a run goes on, its steps and held-out losses stand in the metrics' file alone; the end writes them here too.
Imports nothing heavy: whoever watches a run reads it often.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from shardwright import __version__
from shardwright.runtime.launch.allocator import allocator_setting
from shardwright.runtime.metrics import FILE as METRICS
from shardwright.runtime.metrics import read_metrics
from shardwright.schemas.errors import RunError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import CheckResult, ExportFacts, RunRecord, StepMetric

FILE = "run.json"
WARMUP_STEPS = 1
"""First steps of a run (or of its resumption) that a median time leaves out."""


def versions() -> dict[str, str]:
    """What a plan pins: Python's minor version and the libraries that decide what is computed."""
    import torch
    import transformers

    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "shardwright": __version__,
    }


def start(plan: AdaptationPlan, device: str) -> RunRecord:
    """The record of a run that begins."""
    cost = plan.evidence.cost
    return RunRecord(
        decision_sha256=plan.hashes.decision,
        evidence_sha256=plan.hashes.evidence,
        status="running",
        world_size=plan.decision.strategy.mesh.world_size,
        device=device,
        versions=versions(),
        allocator=allocator_setting(os.environ) if plan.decision.cluster.device_type == "cuda" else "",
        predicted_step_ms=cost.time.step_ms,
        predicted_peak_bytes=cost.memory.peak_bytes,
    )


def write(run_dir: Path, record: RunRecord) -> None:
    """Replace run.json as a whole."""
    write_atomic(run_dir / FILE, record.model_dump_json(indent=2).encode() + b"\n")


def read(run_dir: Path) -> RunRecord:
    """The record of a run; of one that goes on or was killed, with what its metrics hold.

    Raises:
        RunError: ``no-record``.
    """
    path = run_dir / FILE
    if not path.is_file():
        raise RunError("no-record", f"no {FILE}", where=str(run_dir), next_action="run `shardwright apply` first")
    kept = RunRecord.model_validate_json(path.read_bytes())
    if kept.status != "running" or kept.steps or kept.evaluations:
        return kept
    steps, evaluations = read_metrics(run_dir / METRICS)
    return kept.model_copy(update={"steps": tuple(steps), "evaluations": tuple(evaluations), **measured(steps)})


def update(run_dir: Path, **fields: Any) -> RunRecord:
    """Read, change, write."""
    record = RunRecord.model_validate({**read(run_dir).model_dump(), **fields})
    write(run_dir, record)
    return record


def add_export(run_dir: Path, facts: ExportFacts) -> RunRecord:
    """Note another form of the adapter, in place of an older one of the same format."""
    kept = tuple(one for one in read(run_dir).exports if one.format != facts.format)
    return update(run_dir, exports=(*kept, facts))


def with_checks(record: RunRecord, checks: Iterable[CheckResult]) -> tuple[CheckResult, ...]:
    """The record's checks with new results in place of old ones of the same name."""
    fresh = {(check.stage, check.name): check for check in checks}
    kept = [check for check in record.checks if (check.stage, check.name) not in fresh]
    return (*kept, *fresh.values())


def measured(steps: list[StepMetric]) -> dict[str, Any]:
    """Median step time without the first steps, and the highest peak."""
    if not steps:
        return {}
    times = [one.seconds * 1000 for one in steps]
    settled = times[WARMUP_STEPS:] or times
    return {
        "measured_step_ms": median(settled),
        "measured_peak_bytes": max(one.peak_memory_bytes for one in steps),
    }
