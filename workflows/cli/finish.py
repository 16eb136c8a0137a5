"""How ``apply``, ``adapt`` and ``resume`` begin and end: who decides, progress, and the result on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.schemas.errors import ShardwrightError, UsageError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.schemas.policy import Policy, PolicyResult
from shardwright.schemas.run import RunRecord
from shardwright.workflows.cli import faults
from shardwright.workflows.cli.common import Output, facts, json_text, note, put
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


REPORTS = {
    "result.json": Output.json,
    "summary.md": Output.markdown,
    "junit.xml": Output.junit,
    "results.sarif": Output.sarif,
}
"""File of a reports folder → its form."""


@dataclass
class Started:
    """What is known of a run while its command goes on: its folder, as soon as there is one."""

    folder: Path | None = None

    def begin(self, run_dir: Path) -> Progress:
        """Say where the run stands, and give its progress listener."""
        note(f"run folder: {run_dir}")
        self.folder = run_dir
        return Progress()


@contextmanager
def finishing(output: Output, reports: Path | None = None) -> Iterator[Started]:
    """Around the whole of a verb: afterwards put the result, or what ended it in the wanted form, on stdout.

    Args:
        reports: folder that gets the result in every form for machines, whichever way the verb ends. What an earlier
            run left there goes first, so nothing of another run is ever taken for this one's.
    """
    if reports is not None:
        for name in REPORTS:
            (reports / name).unlink(missing_ok=True)
    run = Started()
    try:
        yield run
    except (ShardwrightError, KeyboardInterrupt, OSError, RecursionError) as end:
        error = faults.typed(end)
        put_optional(failure_text(run.folder, output, error))
        _write_reports(reports, {name: failure_text(run.folder, form, error) for name, form in REPORTS.items()})
        raise
    if run.folder is None:
        return
    plan, record = load_plan(run.folder / "plan.json"), load_record(run.folder)
    if record is None:
        raise AssertionError("a finished run has a record")
    put(success_text(run.folder, output, plan, record))
    _write_reports(reports, {name: success_text(run.folder, form, plan, record) for name, form in REPORTS.items()})


def put_optional(text: str) -> None:
    """Write a result to stdout where there is one."""
    if text:
        put(text)


def _write_reports(folder: Path | None, texts: dict[str, str]) -> None:
    if folder is not None:
        for name, text in texts.items():
            write_atomic(folder / name, (text if text.endswith("\n") else text + "\n").encode())


def _policy_result(run_dir: Path | None) -> PolicyResult | None:
    path = None if run_dir is None else run_dir / "policy_result.json"
    return PolicyResult.model_validate_json(path.read_bytes()) if path is not None and path.is_file() else None


def success_text(run_dir: Path, output: Output, plan: AdaptationPlan, record: RunRecord) -> str:
    """The result of a finished run in one form."""
    if output is Output.json:
        return json_text(summary(run_dir, plan, record))
    if output is Output.markdown:
        return limited((run_dir / "report.md").read_text(encoding="utf-8"), run_dir / "report.md")
    if output is Output.junit:
        from shardwright.workflows.report.junit import junit

        return junit(plan, _policy_result(run_dir), record)
    if output is Output.sarif:
        return _sarif(run_dir, record, None)
    return result_text(run_dir, record)


def failure_text(run_dir: Path | None, output: Output, error: ShardwrightError) -> str:
    """What ended a run in one form; empty as text, because stderr says it.

    Args:
        run_dir: ``None`` where the inputs were refused before there was a run.
    """
    if output is Output.json:
        where = None if run_dir is None else str(run_dir)
        return json_text({"schema_version": 1, "run_dir": where, "error": error.as_dict()})
    if output is Output.markdown:
        return limited(failure_markdown(run_dir, error), run_dir)
    if output is Output.text:
        return ""
    record = None if run_dir is None else load_record(run_dir)
    if output is Output.sarif:
        return _sarif(run_dir, record, error)
    from shardwright.workflows.report.junit import junit

    return junit(_plan_of(run_dir, error), _policy_result(run_dir), record, error)


def _plan_of(run_dir: Path | None, error: ShardwrightError) -> AdaptationPlan | None:
    """The run's plan, where it has one that can be read."""
    known = run_dir is not None and (run_dir / "plan.json").is_file() and error.area != "plan"
    return load_plan(run_dir / "plan.json") if known and run_dir is not None else None


def failure_markdown(run_dir: Path | None, error: ShardwrightError) -> str:
    """What ended a run, the policy rule by rule, and the next command."""
    from shardwright.workflows.report.markdown import cell, render
    from shardwright.workflows.report.policy_content import policy_document

    head = f"### ✗ {error.code}\n\n{cell(error.what)}\n\n- where: `{error.where}`\n- next: {cell(error.next_action)}\n"
    result = _policy_result(run_dir)
    return head if result is None else f"{head}\n{render(policy_document([('Policy', result)]))}"


def _sarif(run_dir: Path | None, record: RunRecord | None, error: ShardwrightError | None) -> str:
    from shardwright.workflows.report.sarif import sarif

    result = _policy_result(run_dir)
    found = [] if result is None else [("plan.json", result)]
    told = None if error is not None and error.area == "policy" else error
    return sarif(found, policy_file="policy.yaml", record=record, error=told)


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


def limited(text: str, whole: Path | None) -> str:
    """Text cut at a line so that it stays under the limit, with a pointer to the whole."""
    data = text.encode()
    if len(data) <= SUMMARY_LIMIT:
        return text
    kept = data[:SUMMARY_LIMIT].rsplit(b"\n", 1)[0].decode(errors="ignore")
    more = "" if whole is None else f"; the whole report is `{whole}`"
    return f"{kept}\n\nShortened{more}.\n"
