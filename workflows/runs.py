"""The run record in a run folder: reading it for one plan, demanding checks, completing it after export."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.errors import CheckFailed, ExitCode, RunError, ShardwrightError, StalePlanError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import AdapterFacts, CheckResult, RunRecord
from shardwright.schemas.validation import explain


def record_path(run_dir: Path) -> Path:
    return run_dir / "run.json"


def load_record(run_dir: Path) -> RunRecord | None:
    """The run record, or ``None`` before training has begun; of a run that goes on or was killed with its metrics.

    Raises:
        RunError: ``damaged-record``.
    """
    path = record_path(run_dir)
    if not path.is_file():
        return None
    from shardwright.runtime.record import read

    try:
        return read(run_dir)
    except ValidationError as error:
        raise RunError(
            "damaged-record", explain(error), where=str(path), next_action="run again in another folder"
        ) from error


def read_run(run_dir: Path, plan: AdaptationPlan) -> RunRecord | None:
    """The record of this plan's run.

    Raises:
        StalePlanError: ``other-run``: the folder holds another plan's training.
    """
    record = load_record(run_dir)
    if record is not None and record.decision_sha256 != plan.hashes.decision:
        raise StalePlanError(
            "other-run",
            f"decision {record.decision_sha256[:16]}… was trained here, the plan is {plan.hashes.decision[:16]}…",
            where=str(record_path(run_dir)),
            next_action="name another --run-dir",
        )
    return record


def failed_checks(checks: tuple[CheckResult, ...]) -> tuple[CheckResult, ...]:
    return tuple(check for check in checks if not check.passed)


def demand(checks: tuple[CheckResult, ...], stages: tuple[str, ...], *, where: str) -> None:
    """Every check passed, and each stage has at least one.

    Raises:
        CheckFailed: ``failed`` or ``absent``.
    """
    if failed := failed_checks(checks):
        raise CheckFailed(
            "failed",
            "; ".join(f"{c.stage}/{c.name}: {c.evidence}" for c in failed),
            where=where,
            next_action="do not use this run's weights; the evidence names both sides of the comparison",
        )
    if absent := [stage for stage in stages if not any(c.stage == stage for c in checks)]:
        raise CheckFailed(
            "absent",
            f"no check of stage {', '.join(absent)} was recorded",
            where=where,
            next_action="run again: a run without checks proves nothing",
        )


def failed_launch(status: int, run_dir: Path, record: RunRecord | None) -> ShardwrightError:
    """The typed error for workers that ended without a trained record: their own where they left one."""
    where = str(run_dir / "logs")
    if (left := _left_by_workers(run_dir, status)) is not None:
        return left
    what = record.failure if record is not None and record.failure else f"the workers ended with status {status}"
    if status == ExitCode.CHECK_FAILED:
        return CheckFailed("failed", what, where=where, next_action="read the evidence; nothing was exported")
    if status == ExitCode.STALE_PLAN:
        return StalePlanError("refused", what, where=where, next_action="plan again for the world as it is now")
    return RunError(
        "workers-failed",
        what,
        where=where,
        next_action="read the logs, remove the cause, then start the same command again: it goes on from the last save",
    )


def _left_by_workers(run_dir: Path, status: int) -> ShardwrightError | None:
    from shardwright.runtime.failure import read_failure

    failure = read_failure(run_dir)
    if failure is None or failure["exit_code"] != status:
        return None
    area, _, code = str(failure["code"]).partition("/")
    kinds = {kind.area: kind for kind in every_error(ShardwrightError)}
    kind = kinds.get(area, RunError)
    return kind(code, str(failure["what"]), where=str(failure["where"]), next_action=str(failure["next"]))


def every_error(base: type[ShardwrightError]) -> tuple[type[ShardwrightError], ...]:
    """A class and all that inherit from it."""
    return (base, *(kind for child in base.__subclasses__() for kind in every_error(child)))


def finish_record(
    run_dir: Path, plan: AdaptationPlan, facts: AdapterFacts, checks: tuple[CheckResult, ...]
) -> RunRecord:
    """Add the adapter and the export's checks to ``run.json``; doing it again changes nothing."""
    record = read_run(run_dir, plan)
    if record is None:
        raise RunError("no-record", "no run record", where=str(run_dir), next_action="train first")
    others = tuple(check for check in record.checks if check.stage != "export")
    status = "exported" if all(check.passed for check in checks) else "failed"
    done = record.model_copy(update={"status": status, "adapter": facts, "checks": (*others, *checks)})
    write_atomic(record_path(run_dir), pretty_bytes(done))
    return done
