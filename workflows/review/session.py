"""One review of one plan file: what a reviewer may do, whatever shows it to them."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from shardwright.schemas.approval import Approval, open_questions, read_log
from shardwright.schemas.cost import CostReport
from shardwright.schemas.errors import ApprovalError, ExitCode, UsageError
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.workflows.approvals import latest_verdict, log_beside, person, record_verdict
from shardwright.workflows.edits import answer_question, choose_variant, edit_axes, reject_proposal
from shardwright.workflows.report.units import change, duration, size
from shardwright.workflows.request import load_request, request_path
from shardwright.workflows.review.decisions import DecisionTable
from shardwright.workflows.search_options import SearchOptions, loads_of, stages_for, stages_with
from shardwright.workflows.stages import Stages


@dataclass
class ReviewSession:
    """Edits make child plans that take the plan file's place; ``plans/`` beside it keeps every ancestor.

    Terminal and page share this core: whatever changes the plan, the table of decisions or the log goes through here,
    under a lock on the plan file, after a look at whether another reviewer was faster.
    """

    file: Path
    plan: AdaptationPlan
    log: Path
    actor: str
    stages: Stages
    decisions: DecisionTable = field(init=False)

    def __post_init__(self) -> None:
        self.decisions = DecisionTable(self.file)

    @classmethod
    def open(
        cls, file: Path, *, actor: str | None = None, log: Path | None = None, stages: Stages | None = None
    ) -> ReviewSession:
        """Read and verify a plan file.

        Raises:
            PlanError: the file is missing or was edited by hand.
        """
        plan = load_plan(file)
        return cls(file, plan, log or log_beside(file), actor or person(), stages or _stages_beside(file, plan))

    def edit(self, values: dict[str, str], reason: str) -> str:
        """Change axes; returns what that did to the cost, in words."""
        with self._alone():
            return self._replace(edit_axes(self.stages, self.plan, values, reason=reason, actor=self.actor))

    def choose(self, proposal_id: str, variant: str, reason: str) -> str:
        """Run one fusion's region by another of its variants; returns what that did to the cost, in words."""
        with self._alone():
            child = choose_variant(self.stages, self.plan, proposal_id, variant, reason=reason, actor=self.actor)
            words = self._replace(child)
            self.decisions.accept(child, (proposal_id,), self.actor)
            return words

    def reject(self, proposal_id: str, reason: str) -> str:
        """Turn down one fusion; returns what that did to the cost, in words."""
        with self._alone():
            return self._replace(reject_proposal(self.stages, self.plan, proposal_id, reason=reason, actor=self.actor))

    def answer(self, question_id: str, answer: str, reason: str) -> str:
        """Answer what rules could not decide; returns what was answered, in words."""
        with self._alone():
            self._replace(answer_question(self.plan, question_id, answer, reason=reason, actor=self.actor))
            return f"Answered {question_id}: {answer}."

    def accept(self, proposal_ids: tuple[str, ...]) -> None:
        """Accept fusions as they stand.

        Raises:
            ApprovalError: ``decided-first`` where another reviewer accepted one of them, ``decided`` where the plan
                has its verdict, ``changed-meanwhile``.
            UsageError: ``unknown-proposal``.
        """
        with self._alone():
            self._undecided()
            known = {fusion.proposal_id for fusion in self.plan.decision.fusions if not fusion.rejected}
            if unknown := [name for name in proposal_ids if name not in known]:
                raise UsageError(
                    "unknown-proposal",
                    f"nothing to accept called {', '.join(unknown)}",
                    where=f"plan {self.plan.hashes.decision[:16]}…",
                    next_action="accept fusions of this plan that are not rejected",
                )
            self.decisions.accept(self.plan, proposal_ids, self.actor)

    def reopen(self, proposal_id: str) -> None:
        """Take an acceptance back, while the plan has no verdict."""
        with self._alone():
            self._undecided()
            self.decisions.withdraw(self.plan, proposal_id)

    def undecided(self) -> tuple[str, ...]:
        """Fusions that nobody has accepted or rejected yet."""
        return self.decisions.undecided(self.plan)

    def approve(self, reason: str = "", *, every_fusion: bool = True) -> None:
        """Approve the plan.

        Args:
            every_fusion: accept all that is undecided with it; otherwise each must have been decided.

        Raises:
            ApprovalError: ``open-question``, ``undecided-proposal``, or ``broken-chain`` and ``decided`` where another
                reviewer was first.
        """
        with self._alone():
            if waiting := open_questions(self.plan):
                raise ApprovalError(
                    "open-question",
                    f"questions without an answer: {', '.join(waiting)}",
                    where=str(self.file),
                    next_action="answer them first",
                )
            waiting = self.undecided()
            if waiting and not every_fusion:
                raise ApprovalError(
                    "undecided-proposal",
                    f"{len(waiting)} fusions are neither accepted nor rejected: {', '.join(waiting[:5])}",
                    where=str(self.file),
                    next_action="decide each of them first",
                )
            self._undecided()
            if waiting:
                self.decisions.accept(self.plan, waiting, self.actor)
            self._verdict("approve", reason)

    def reject_plan(self, reason: str) -> None:
        """Reject the whole plan."""
        with self._alone():
            self._verdict("reject", reason)

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

    def _verdict(self, verdict: str, reason: str) -> None:
        record_verdict(self.log, self.plan, verdict=verdict, actor=self.actor, actor_kind="person", reason=reason)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the plan file's lock, and act only on the plan that this review shows."""
        with open(self.file.with_name(f".{self.file.name}.lock"), "a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            self._same_file()
            yield

    def _undecided(self) -> None:
        """The plan has no approval yet.

        Raises:
            ApprovalError: ``decided``, naming who approved it.
        """
        verdict = latest_verdict(self.log, self.plan)
        if verdict is not None and verdict.verdict == "approve":
            raise ApprovalError(
                "decided",
                f"{verdict.actor} approved this plan at {verdict.time}",
                where=str(self.log),
                next_action="open the review again; an edit or a rejection makes a child plan to decide anew",
            )

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
        parent = self.plan
        for kept in (parent, child):
            kept.save(plan_copy(self.file, kept))
        self.decisions.carry(parent, child)
        child.save(self.file)
        self.plan = child
        return cost_change(parent, child)

    def parent(self) -> AdaptationPlan | None:
        """The plan that this one was edited from, where ``plans/`` beside the file still has it."""
        for path in sorted((self.file.parent / "plans").glob(f"{(self.plan.decision.parent_hash or '-')[:16]}-*.json")):
            return load_plan(path)
        return None

    def verdicts(self) -> tuple[Approval, ...]:
        """The whole approvals log, verified."""
        return read_log(self.log) if self.log.exists() else ()


def _stages_beside(file: Path, plan: AdaptationPlan) -> Stages:
    """The work that the plan's run asked for, so that an edit is priced as the plan was; elsewhere by its own loads.

    A plan that was priced with a calibration can be looked at, approved and rejected away from its run; an edit that
    needs a price is refused there.
    """
    beside = file.resolve().parent
    if request_path(beside).is_file():
        return stages_for(load_request(beside))
    stages = stages_with(SearchOptions(loads=loads_of(plan)))
    digest = plan.evidence.provenance.calibration_digest
    return stages if digest is None else replace(stages, estimate=partial(_unpriced, file, digest))


def _unpriced(file: Path, digest: str, *_: object) -> CostReport:
    raise UsageError(
        "calibration-elsewhere",
        f"the plan was priced with calibration {digest[:16]}…, whose file only its run's folder names",
        where=str(file),
        next_action="edit the plan in the folder of its run, or plan again with --calibration",
    )


def plan_copy(file: Path, plan: AdaptationPlan) -> Path:
    """Where a plan is kept for good, beside the file under review."""
    return file.parent / "plans" / f"{plan.hashes.decision[:16]}-{plan.hashes.evidence[:16]}.json"


def cost_change(before: AdaptationPlan, after: AdaptationPlan) -> str:
    """What an edit did to step time and memory."""
    old, new = before.evidence.cost, after.evidence.cost
    s, t = old.time.step_ms, new.time.step_ms
    a, b = old.memory.reserved_bytes, new.memory.reserved_bytes
    time = f"step {duration(s)} → {duration(t)} ({change(s, t)})"
    return f"child plan {after.hashes.decision[:16]}…: {time}, memory {size(a)} → {size(b)} ({change(a, b)})"
