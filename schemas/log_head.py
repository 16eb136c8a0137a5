"""How far an approvals log reached: a line cut off its end is seen by whoever kept this.

Lines of the log are chained, so a line that was changed, removed or moved inside it is seen in the log alone; its end
is not. The head is kept in three places, each against more: in a file beside the log, against a log that was cut or
restored by itself; signed there where reviewers share a key, against whoever may write both files and has not the key;
in every run's record, and by whoever names it (``apply --approvals-head``), against a log and a head that were put back
together to what they once were.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from shardwright.schemas.base import Model, PositiveInt, Sha256, added
from shardwright.schemas.canonical import canonical_bytes
from shardwright.schemas.errors import ApprovalError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.validation import explain


class LogHead(Model):
    """The last line of a log and its number."""

    schema_version: int = 1
    lines: PositiveInt
    sha256: Sha256
    """Of the last line; it covers all lines before it."""
    hmac_sha256: Sha256 | None = added(None)
    """HMAC-SHA-256 of number and hash under the key that reviewers share; ``None`` where unsigned."""

    @classmethod
    def of(cls, hashes: Sequence[str], key: bytes | None = None) -> LogHead:
        """The head of a log whose lines have these hashes; signed where a key is given."""
        head = cls(lines=len(hashes), sha256=hashes[-1])
        return head if key is None else head.model_copy(update={"hmac_sha256": signature_of(head.text(), key)})

    def text(self) -> str:
        """What is signed."""
        return f"{self.lines}:{self.sha256}"


def signature_of(text: str, key: bytes) -> str:
    """HMAC-SHA-256 of a text, as hex."""
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def head_path(log: Path) -> Path:
    """Beside the log: ``approvals.jsonl.head``."""
    return log.with_name(f"{log.name}.head")


def read_head(log: Path) -> LogHead | None:
    """The head beside a log; ``None`` where there is none.

    Raises:
        ApprovalError: ``unreadable``.
    """
    path = head_path(log)
    if not path.is_file():
        return None
    try:
        return LogHead.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ApprovalError(
            "unreadable", explain(error), where=str(path), next_action="restore the log and its head from their backup"
        ) from error


def write_head(log: Path, head: LogHead) -> None:
    """Put a head beside a log whose lines are on the disk already."""
    write_atomic(head_path(log), canonical_bytes(head) + b"\n")


def demand_held(hashes: Sequence[str], head: LogHead, log: Path, kept: str) -> None:
    """The log still has the line that a head names, at its place; it may have grown since.

    Args:
        hashes: of the log's lines, in their order.
        kept: who kept the head, for the message.

    Raises:
        ApprovalError: ``cut-log``.
    """
    if len(hashes) >= head.lines and hashes[head.lines - 1] == head.sha256:
        return
    found = f"line {head.lines} is another" if len(hashes) >= head.lines else f"it has {len(hashes)}"
    raise ApprovalError(
        "cut-log",
        f"{kept} saw {head.lines} lines in the log, the last {head.sha256[:16]}…; {found}: verdicts were taken away",
        where=str(log),
        next_action="restore the log from its backup; where nobody has one, move it and its head away and review again",
    )
