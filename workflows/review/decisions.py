"""Who accepted which proposal of which plan: a small table beside the plan, the authority while a review is open.

A row is keyed by the plan's decision hash and the proposal's id, so that two reviewers cannot both decide one
proposal: the first insert wins, the other is told who was first. Rejections are not rows: they make child plans.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from shardwright.schemas.approval import proposals_to_decide
from shardwright.schemas.base import Model
from shardwright.schemas.errors import ApprovalError
from shardwright.schemas.plan import AdaptationPlan

TABLE = """
CREATE TABLE IF NOT EXISTS decisions (
  plan_sha256 TEXT NOT NULL,
  proposal_id TEXT NOT NULL,
  actor TEXT NOT NULL,
  time TEXT NOT NULL,
  PRIMARY KEY (plan_sha256, proposal_id)
)
"""
WAIT_S = 5.0


class Accepted(Model):
    """One proposal that a reviewer accepted as it stands in one plan."""

    proposal_id: str
    actor: str
    time: str


class DecisionTable:
    """``decisions.sqlite`` beside a plan file.

    Raises:
        ApprovalError: ``decisions-unavailable`` where the database is locked, damaged or gone.
    """

    def __init__(self, plan_file: Path) -> None:
        self.path = plan_file.with_name("decisions.sqlite")

    def accepted(self, plan: AdaptationPlan) -> dict[str, Accepted]:
        """Proposal id → who accepted it, for exactly this plan."""
        if not self.path.exists():
            return {}
        with self._open() as connection:
            rows = connection.execute(
                "SELECT proposal_id, actor, time FROM decisions WHERE plan_sha256 = ?", (plan.hashes.decision,)
            ).fetchall()
        return {name: Accepted(proposal_id=name, actor=actor, time=time) for name, actor, time in rows}

    def accept(self, plan: AdaptationPlan, proposal_ids: tuple[str, ...], actor: str) -> None:
        """Accept proposals, all of them or none.

        Raises:
            ApprovalError: ``decided-first``, naming the reviewer who was faster.
        """
        with self._open() as connection:
            for name in proposal_ids:
                row = (plan.hashes.decision, name, actor, _now())
                try:
                    connection.execute("INSERT INTO decisions VALUES (?, ?, ?, ?)", row)
                except sqlite3.IntegrityError as error:
                    first = connection.execute(
                        "SELECT actor, time FROM decisions WHERE plan_sha256 = ? AND proposal_id = ?", row[:2]
                    ).fetchone()
                    raise ApprovalError(
                        "decided-first",
                        f"{name} was accepted already by {first[0]} at {first[1]}",
                        where=str(self.path),
                        next_action="look at the review again; nothing was changed by this request",
                    ) from error

    def withdraw(self, plan: AdaptationPlan, proposal_id: str) -> None:
        """Open a proposal again."""
        with self._open() as connection:
            connection.execute(
                "DELETE FROM decisions WHERE plan_sha256 = ? AND proposal_id = ?", (plan.hashes.decision, proposal_id)
            )

    def carry(self, parent: AdaptationPlan, child: AdaptationPlan) -> None:
        """Keep what was accepted in the parent where the child does exactly the same for that proposal."""
        before = {fusion.proposal_id: fusion for fusion in parent.decision.fusions}
        same = [f.proposal_id for f in child.decision.fusions if f == before.get(f.proposal_id)]
        with self._open() as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO decisions SELECT ?, proposal_id, actor, time FROM decisions "
                "WHERE plan_sha256 = ? AND proposal_id = ?",
                [(child.hashes.decision, parent.hashes.decision, name) for name in same],
            )

    def undecided(self, plan: AdaptationPlan) -> tuple[str, ...]:
        """Fusions of the plan that are neither rejected nor accepted, in the plan's order."""
        accepted = self.accepted(plan)
        rejected = {fusion.proposal_id for fusion in plan.decision.fusions if fusion.rejected}
        return tuple(name for name in proposals_to_decide(plan) if name not in accepted and name not in rejected)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level="IMMEDIATE")
        except sqlite3.Error as error:
            raise self._unavailable(error) from error
        try:
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(TABLE)
            with connection:
                yield connection
        except sqlite3.DatabaseError as error:
            raise self._unavailable(error) from error
        finally:
            connection.close()

    def _unavailable(self, error: sqlite3.Error) -> ApprovalError:
        return ApprovalError(
            "decisions-unavailable",
            f"the table of decisions cannot be used: {error}",
            where=str(self.path),
            next_action="close other reviews of this plan, or move the file away: plan and approvals are not touched",
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
