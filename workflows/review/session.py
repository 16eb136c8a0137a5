"""One review of one plan file: what a reviewer may do, whatever shows it to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwright.schemas.approval import open_questions
from shardwright.schemas.errors import ApprovalError, ExitCode
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.workflows.approvals import latest_verdict, log_beside, person, record_verdict
from shardwright.workflows.edits import edit_axes, reject_proposal
from shardwright.workflows.report.units import change, duration, size
from shardwright.workflows.stages import Stages


@dataclass
class ReviewSession:
    """Edits make child plans that take the plan file's place; ``plans/`` beside it keeps every ancestor."""

    file: Path
    plan: AdaptationPlan
    log: Path
    actor: str
    stages: Stages

    @classmethod
    def open(
        cls, file: Path, *, actor: str | None = None, log: Path | None = None, stages: Stages | None = None
    ) -> ReviewSession:
        """Read and verify a plan file.

        Raises:
            PlanError: the file is missing or was edited by hand.
        """
        return cls(file, load_plan(file), log or log_beside(file), actor or person(), stages or Stages())

    def edit(self, values: dict[str, str], reason: str) -> str:
        """Change axes; returns what that did to the cost, in words."""
        return self._replace(edit_axes(self.stages, self.plan, values, reason=reason, actor=self.actor))

    def reject(self, proposal_id: str, reason: str) -> str:
        """Turn down one fusion; returns what that did to the cost, in words."""
        return self._replace(reject_proposal(self.stages, self.plan, proposal_id, reason=reason, actor=self.actor))

    def approve(self, reason: str = "") -> None:
        """Approve the plan with every proposal in it.

        Raises:
            ApprovalError: ``open-question``, or ``broken-chain`` where another reviewer was first.
        """
        self._same_file()
        if waiting := open_questions(self.plan):
            raise ApprovalError(
                "open-question",
                f"questions without an answer: {', '.join(waiting)}",
                where=str(self.file),
                next_action="answer them first",
            )
        record_verdict(self.log, self.plan, verdict="approve", actor=self.actor, actor_kind="person", reason=reason)

    def reject_plan(self, reason: str) -> None:
        """Reject the whole plan."""
        self._same_file()
        record_verdict(self.log, self.plan, verdict="reject", actor=self.actor, actor_kind="person", reason=reason)

    def status(self) -> tuple[str, ExitCode]:
        """Whether this plan is approved, and the exit code that says so."""
        verdict = latest_verdict(self.log, self.plan)
        name = f"plan {self.plan.hashes.decision[:16]}…"
        if verdict is None:
            return f"{name}: waits for a verdict", ExitCode.NEEDS_APPROVAL
        words = f"{name}: {verdict.verdict}d by {verdict.actor} at {verdict.time}".replace("rejectd", "rejected")
        if verdict.verdict == "approve":
            return words, ExitCode.OK
        return f"{words}: {verdict.reason}", ExitCode.NEEDS_APPROVAL

    def _same_file(self) -> None:
        current = load_plan(self.file)
        if current.hashes != self.plan.hashes:
            raise ApprovalError(
                "changed-meanwhile",
                f"the file now holds plan {current.hashes.decision[:16]}…, this review showed "
                f"{self.plan.hashes.decision[:16]}…",
                where=str(self.file),
                next_action="open the review again: another reviewer edited the plan",
            )

    def _replace(self, child: AdaptationPlan) -> str:
        self._same_file()
        parent = self.plan
        for kept in (parent, child):
            name = f"{kept.hashes.decision[:16]}-{kept.hashes.evidence[:16]}.json"
            kept.save(self.file.parent / "plans" / name)
        child.save(self.file)
        self.plan = child
        return cost_change(parent, child)


def cost_change(before: AdaptationPlan, after: AdaptationPlan) -> str:
    """What an edit did to step time and memory."""
    old, new = before.evidence.cost, after.evidence.cost
    s, t = old.time.step_ms, new.time.step_ms
    a, b = old.memory.reserved_bytes, new.memory.reserved_bytes
    time = f"step {duration(s)} → {duration(t)} ({change(s, t)})"
    return f"child plan {after.hashes.decision[:16]}…: {time}, memory {size(a)} → {size(b)} ({change(a, b)})"
