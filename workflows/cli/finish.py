"""How ``apply``, ``adapt`` and ``resume`` begin and end: who decides, progress, and the result on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.schemas.errors import ShardwrightError, UsageError
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.schemas.policy import Policy, PolicyResult
from shardwright.schemas.run import RunRecord
from shardwright.workflows.cli.common import Output, facts, note, put, put_json
from shardwright.workflows.cli.progress import Progress
from shardwright.workflows.decide import Reviewer
from shardwright.workflows.policy import load_policy
from shardwright.workflows.report.run_content import held_out
from shardwright.workflows.report.units import change
from shardwright.workflows.runs import load_record

SUMMARY_LIMIT = 1_000_000
"""Bytes; step summaries above 1 MiB are refused by their hosts."""


def deciders(headless: bool, policy: Path | None) -> tuple[Policy | None, Reviewer | None]:
    """The policy and the person that may decide at review.

    Raises:
        UsageError: ``--headless`` without a policy, or a policy without ``--headless``.
    """
    if headless and policy is None:
        raise UsageError("no-policy", "--headless needs a policy", where="--policy", next_action="name a policy file")
    if policy is not None and not headless:
        raise UsageError(
            "policy-without-headless",
            "a policy decides only where nobody is asked",
            where="--policy",
            next_action="add --headless, or leave --policy out and review the plan yourself",
        )
    if policy is not None:
        return load_policy(policy), None
    if sys.stdin.isatty() and sys.stdout.isatty():
        from shardwright.workflows.review.terminal import review_in_terminal

        return None, review_in_terminal
    return None, None


@contextmanager
def finishing(run_dir: Path, output: Output) -> Iterator[Progress]:
    """Give a progress listener; afterwards put the result, or the error in the wanted form, on stdout."""
    note(f"run folder: {run_dir}")
    try:
        yield Progress()
    except ShardwrightError as error:
        _put_failure(run_dir, output, error)
        raise
    plan, record = load_plan(run_dir / "plan.json"), load_record(run_dir)
    if record is None:
        raise AssertionError("a finished run has a record")
    _put_success(run_dir, output, plan, record)


def _policy_result(run_dir: Path) -> PolicyResult | None:
    path = run_dir / "policy_result.json"
    return PolicyResult.model_validate_json(path.read_bytes()) if path.is_file() else None


def _put_success(run_dir: Path, output: Output, plan: AdaptationPlan, record: RunRecord) -> None:
    if output is Output.json:
        put_json(summary(run_dir, plan, record))
    elif output is Output.markdown:
        put(limited((run_dir / "report.md").read_text(encoding="utf-8"), run_dir / "report.md"))
    elif output is Output.junit:
        from shardwright.workflows.report.junit import junit

        put(junit(plan, _policy_result(run_dir), record))
    else:
        put(result_text(run_dir, record))


def _put_failure(run_dir: Path, output: Output, error: ShardwrightError) -> None:
    if output is Output.json:
        put_json({"schema_version": 1, "run_dir": str(run_dir), "error": error.as_dict()})
    elif output is Output.markdown:
        put(f"## ✗ {error.code}\n\n{error.what}\n\n- where: `{error.where}`\n- next: {error.next_action}\n")
    elif output is Output.junit:
        from shardwright.workflows.report.junit import junit

        plan = load_plan(run_dir / "plan.json") if (run_dir / "plan.json").is_file() and error.area != "plan" else None
        put(junit(plan, _policy_result(run_dir), load_record(run_dir), error))


def summary(run_dir: Path, plan: AdaptationPlan, record: RunRecord) -> dict[str, Any]:
    """The result for programs."""
    losses = held_out(record)
    return {
        "schema_version": 1,
        "run_dir": str(run_dir),
        "decision_sha256": plan.hashes.decision,
        "evidence_sha256": plan.hashes.evidence,
        "strategy": plan.decision.strategy.model_dump(mode="json"),
        "held_out_loss": {"before": losses[0], "after": losses[1]} if losses else None,
        "checks": [check.model_dump(mode="json") for check in record.checks],
        "adapter": record.adapter.model_dump(mode="json") if record.adapter else None,
        "report": str(run_dir / "report.html"),
    }


def result_text(run_dir: Path, record: RunRecord) -> str:
    """The result for people."""
    losses = held_out(record)
    rows = []
    if losses is not None:
        rows.append(("held-out loss", f"{losses[0]:.4f} → {losses[1]:.4f} ({change(*losses)})"))
    passed = sum(check.passed for check in record.checks)
    rows.append(("checks", f"{passed} of {len(record.checks)} passed"))
    rows += [(f"  {c.stage}", f"{'✓' if c.passed else '✗'} {c.name}: {c.evidence}") for c in record.checks]
    if record.adapter is not None:
        rows.append(("adapter", record.adapter.path))
    rows.append(("report", str(run_dir / "report.html")))
    return facts(rows)


def limited(text: str, whole: Path) -> str:
    """Text cut at a line so that it stays under the limit, with a pointer to the whole."""
    data = text.encode()
    if len(data) <= SUMMARY_LIMIT:
        return text
    kept = data[:SUMMARY_LIMIT].rsplit(b"\n", 1)[0].decode(errors="ignore")
    return f"{kept}\n\nShortened; the whole report is `{whole}`.\n"
