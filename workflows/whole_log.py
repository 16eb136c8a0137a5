"""Whether an approvals log still has every verdict, asked before anything runs by it."""

from __future__ import annotations

import hmac
from pathlib import Path

from shardwright.schemas.approval import read_log
from shardwright.schemas.errors import ApprovalError
from shardwright.schemas.log_head import LogHead, demand_held, head_path, read_head, signature_of
from shardwright.schemas.plan import AdaptationPlan
from shardwright.workflows.approvals import signing_key
from shardwright.workflows.runs import load_record


def head_seen(run_dir: Path, plan: AdaptationPlan) -> LogHead | None:
    """How far the approvals log reached when this plan's run last started; ``None`` before it has.

    Raises:
        RunError: ``damaged-record``.
    """
    record = load_record(run_dir)
    return record.approvals if record is not None and record.decision_sha256 == plan.hashes.decision else None


def demand_whole_log(log: Path, seen: LogHead | None, expected: str | None = None) -> None:
    """No verdict was cut off a log's end, as far as anybody kept how far it reached.

    Args:
        seen: what an earlier start of the same run saw; ``None`` for a first start.
        expected: hash of a line that the log must have; its head once, kept where the log's writers cannot write.

    Raises:
        ApprovalError: ``cut-log``; where a key is set here, ``unsigned`` or ``wrong-signature`` for the head.
    """
    hashes = [line.sha256 for line in read_log(log)]
    if seen is not None:
        demand_held(hashes, seen, log, "an earlier start of this run")
    if expected is not None and expected not in hashes:
        raise ApprovalError(
            "cut-log",
            f"none of the log's {len(hashes)} lines is the expected {expected[:16]}…: verdicts were taken away",
            where=str(log),
            next_action="restore the log from its backup, or expect the head that it has now (`cat` its .head file)",
        )
    key = signing_key()
    if key is not None:
        _demand_signed_head(read_head(log), key, head_path(log))


def _demand_signed_head(head: LogHead | None, key: bytes, where: Path) -> None:
    if head is None or head.hmac_sha256 is None:
        raise ApprovalError(
            "unsigned",
            "a signing key is set here, the log's head " + ("is not there" if head is None else "has no signature"),
            where=str(where),
            next_action="give a verdict with the key set: that signs the head",
        )
    if not hmac.compare_digest(head.hmac_sha256, signature_of(head.text(), key)):
        raise ApprovalError(
            "wrong-signature",
            "the log's head was signed with another key, or altered after it was signed",
            where=str(where),
            next_action="restore the log and its head from their backup; then give a verdict with the key set",
        )
