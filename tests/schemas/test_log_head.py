"""The head of an approvals log: a verdict cut off the log's end is seen."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.schemas.approval import Approval, append_to_log, copy_log, find_approval, read_log
from shardwright.schemas.errors import ApprovalError
from shardwright.schemas.log_head import LogHead, demand_held, head_path, read_head
from shardwright.schemas.plan import AdaptationPlan

Log = Callable[..., Path]


@pytest.fixture
def log(plan: AdaptationPlan, tmp_path: Path) -> Log:
    """A log of verdicts: ``approve``, then a rejection that takes it back."""

    def write(*verdicts: str, numbered: bool = True, key: bytes | None = None) -> Path:
        path = tmp_path / "approvals.jsonl"
        for verdict in verdicts:
            before = read_log(path)
            number = {"number": len(before) + 1} if numbered else {}
            line = Approval.seal(
                decision_sha256=plan.hashes.decision,
                evidence_sha256=plan.hashes.evidence,
                verdict=verdict,
                actor="ada",
                actor_kind="person",
                reason="as told",
                time="2026-01-01T00:00:00Z",
                previous_sha256=before[-1].sha256 if before else None,
                **number,
            )
            append_to_log(path, line, key)
        return path

    return write


def cut(path: Path, lines: int) -> None:
    """Keep the first lines."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))


def code(path: Path) -> str:
    with pytest.raises(ApprovalError) as caught:
        read_log(path)
    return caught.value.code


def test_the_head_is_the_number_and_hash_of_the_last_line(log: Log) -> None:
    path = log("approve", "reject")
    last = json.loads(path.read_bytes().splitlines()[-1])
    body = {key: value for key, value in last.items() if key not in ("sha256", "hmac_sha256")}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    found = json.loads(head_path(path).read_bytes())
    assert found == {"schema_version": 1, "lines": 2, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    assert last["number"] == 2


def test_a_rejection_cut_off_the_end_is_seen(log: Log, plan: AdaptationPlan) -> None:
    """Without the head the log would be whole, and the plan approved."""
    path = log("approve", "reject")
    cut(path, 1)
    assert code(path) == "approval/cut-log"
    with pytest.raises(ApprovalError, match=r"saw 2 lines in the log.*; it has 1"):
        find_approval(path, plan)
    with pytest.raises(ApprovalError, match="cut-log"):
        log("approve")
    path.unlink()
    assert code(path) == "approval/cut-log", "the whole log taken away"


def test_another_line_at_its_place_is_seen(log: Log) -> None:
    path = log("approve", "reject")
    head = head_path(path).read_bytes()
    cut(path, 1)
    head_path(path).unlink()
    assert code(path) == "approval/no-head"
    head_path(path).write_bytes(LogHead.of([read_head_free(path)]).model_dump_json().encode())
    log("approve")
    head_path(path).write_bytes(head)
    with pytest.raises(ApprovalError, match="line 2 is another"):
        read_log(path)


def read_head_free(path: Path) -> str:
    """Hash of a log's first line."""
    return str(json.loads(path.read_bytes().splitlines()[0])["sha256"])


def test_a_log_from_before_heads_is_read_and_gets_one_with_its_next_line(log: Log) -> None:
    path = log("approve", "reject", numbered=False)
    head_path(path).unlink()
    assert [line.verdict for line in read_log(path)] == ["approve", "reject"]
    cut(path, 1)
    assert len(read_log(path)) == 1, "what nobody kept is not seen"
    log("reject")
    assert read_head(path) == LogHead.of([line.sha256 for line in read_log(path)])
    head_path(path).unlink()
    assert code(path) == "approval/no-head"


def test_a_line_written_before_the_head_moved_is_no_cut(log: Log) -> None:
    """Killed between the two, or read while another reviewer decides; the next line moves the head."""
    path = log("approve")
    head = head_path(path).read_bytes()
    log("reject")
    head_path(path).write_bytes(head)
    assert len(read_log(path)) == 2
    log("approve")
    found = read_head(path)
    assert found is not None and found.lines == 3


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"lines": 0, "sha256": "00"}'])
def test_a_damaged_head_is_refused(log: Log, text: bytes) -> None:
    path = log("approve")
    head_path(path).write_bytes(text)
    assert code(path) == "approval/unreadable"


def test_a_line_that_was_numbered_for_another_place_is_refused(log: Log, plan: AdaptationPlan, tmp_path: Path) -> None:
    path = log("approve")
    line = read_log(path)[0]
    moved = Approval.seal(**{**line.model_dump(exclude={"sha256"}), "number": 3, "previous_sha256": line.sha256})
    with pytest.raises(ApprovalError, match="broken-chain"):
        append_to_log(path, moved)
    alone = Approval.seal(**{**line.model_dump(exclude={"sha256"}), "number": 2})
    other = tmp_path / "other.jsonl"
    other.write_text(alone.model_dump_json() + "\n")
    assert code(other) == "approval/broken-chain"


def test_a_head_is_signed_under_the_reviewers_key(log: Log) -> None:
    path = log("approve", key=b"reviewers")
    found, (line,) = read_head(path), read_log(path)
    assert found is not None
    assert found.hmac_sha256 == hmac.new(b"reviewers", f"1:{line.sha256}".encode(), hashlib.sha256).hexdigest()


def test_a_copy_has_the_logs_head(log: Log, tmp_path: Path) -> None:
    path, target = log("approve", "reject", key=b"reviewers"), tmp_path / "run" / "approvals.jsonl"
    copy_log(path, target)
    assert target.read_bytes() == path.read_bytes() and read_head(target) == read_head(path) is not None
    head_path(path).unlink()
    path.unlink()
    old = log("approve", numbered=False)
    head_path(old).unlink()
    copy_log(old, target)
    assert len(read_log(target)) == 1 and read_head(target) is None, "no head of another log is left"


def test_what_was_seen_must_still_be_there(tmp_path: Path) -> None:
    hashes = [character * 64 for character in "abc"]
    demand_held(hashes, LogHead.of(hashes[:2]), tmp_path, "a run")
    demand_held(hashes, LogHead.of(hashes), tmp_path, "a run")
    for now in (hashes[:1], [hashes[0], "d" * 64, hashes[2]], []):
        with pytest.raises(ApprovalError, match="a run saw 2 lines"):
            demand_held(now, LogHead.of(hashes[:2]), tmp_path, "a run")
