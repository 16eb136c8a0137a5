"""A run's own account: rank 0 keeps its record, metrics and progress lines current; other ranks only take part.

Steps and held-out losses are appended to the metrics as they come. The record's file is written anew only where the
run's state changes, without them, and whole when the run ends: what a step costs does not grow with the steps before.

Every call is made on all ranks. What ends a run on one rank, a check that failed there, ends it on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.runtime import record
from shardwright.runtime.agree import together
from shardwright.runtime.checks.compare import require
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.failure import free_room
from shardwright.runtime.mesh import Ranks
from shardwright.runtime.metrics import Metrics, say
from shardwright.runtime.preflight.run import warnings as preflight_warnings
from shardwright.schemas.errors import RunInterrupted
from shardwright.schemas.log_head import LogHead
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import (
    CheckResult,
    EvalMetric,
    ExpertLoad,
    LoadFacts,
    PreflightResult,
    RunRecord,
    StepMetric,
    WayTaken,
)

PLAN_COPY = "plan.json"
PROGRESS_S = 2.0
"""Seconds between two progress lines of loading."""


class RunLog:
    """What happened so far.

    Attributes:
        first: whether this is rank 0.
        record: the run's record as its file has it while the run goes on, on rank 0.
        steps, evaluations: what the metrics' file holds, on rank 0.
    """

    def __init__(self, plan: AdaptationPlan, run_dir: Path, ranks: Ranks, device_name: str) -> None:
        self.plan, self.run_dir, self.ranks, self.device_name = plan, run_dir, ranks, device_name
        self.first = ranks.rank == 0
        self.metrics: Metrics | None = None
        self.record: RunRecord | None = None
        self.steps: list[StepMetric] = []
        self.evaluations: list[EvalMetric] = []

    def begin(self, seen: LogHead | None = None, notes: tuple[str, ...] = ()) -> None:
        """Keep the plan, open the metrics, go on with the record of the same decision or start one.

        Args:
            seen: how far the approvals log reached.
            notes: decisions that were taken before; each is kept once, however often the run starts.
        """
        if not self.first:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        # The plan that was verified, not what its file may say by now.
        copy = self.run_dir / PLAN_COPY
        if not copy.is_file() or copy.read_bytes() != self.plan.to_bytes():
            self.plan.save(copy)
        recipe, decision = self.plan.decision.recipe, self.plan.hashes.decision
        about = {"run": recipe.name, "decision": decision[:16]}
        self.metrics = Metrics(self.run_dir, recipe.schedule.steps, about)
        before = record.read(self.run_dir) if (self.run_dir / record.FILE).is_file() else None
        self.record = record.start(self.plan, self.device_name)
        if before is not None and before.decision_sha256 == self.record.decision_sha256:
            self.steps, self.evaluations = list(before.steps), list(before.evaluations)
            again = {"status": "running", "failure": "", "steps": (), "evaluations": ()}
            self.record = before.model_copy(update=again)
        fresh = tuple(note for note in notes if note not in self.record.warnings)
        self.record = self.record.model_copy(update={"warnings": (*self.record.warnings, *fresh), "approvals": seen})
        record.write(self.run_dir, self.record)
        for note in notes:
            say(f"warning: {note}")
        say(f"plan {decision[:12]}: {self.plan.decision.strategy.text()}, {self.ranks.world} ranks")

    def close(self) -> None:
        """End the metrics' files; what cannot be written any more is lost with a word, not with the run."""
        if self.metrics is not None:
            try:
                self.metrics.close()
            except OSError as error:
                with contextlib.suppress(OSError):
                    say(f"the last metrics were not written: {error}")

    def failed(self, error: BaseException) -> None:
        """How the run ended, before its end is known elsewhere; on a full disk the room that was kept for it is used.

        A record that cannot be written hides no error: what ended the run is raised by the caller.
        """
        stopped = isinstance(error, RunInterrupted)
        end = {"status": "interrupted" if stopped else "failed", "failure": "" if stopped else str(error)[:2000]}
        try:
            self._end(**end)
        except OSError:
            free_room(self.run_dir)
            with contextlib.suppress(OSError):
                self._end(**end)

    def preflight(self, results: tuple[PreflightResult, ...]) -> None:
        """What was found before anything was loaded."""
        if self.record is None:
            return
        self._note(preflight=results, warnings=(*self.record.warnings, *preflight_warnings(results)))
        for one in results:
            say(f"preflight {one.name}: {'passed' if one.passed else 'FAILED'} ({one.where}: {one.evidence})")

    def progress(self) -> Callable[[int, int, int, float], None] | None:
        """Tells tensors, bytes and rate of loading every other second; ``None`` on other ranks."""
        if not self.first:
            return None
        shown = [0.0]

        def told(bytes_read: int, tensors: int, of: int, seconds: float) -> None:
            if seconds - shown[0] >= PROGRESS_S:
                shown[0] = seconds
                rate = bytes_read / 1e6 / seconds
                say(f"loading: {tensors} of {of} tensors, {bytes_read / 1e6:.0f} MB, {rate:.0f} MB/s")

        return told

    def loaded(self, facts: LoadFacts) -> None:
        """Bytes, rate and peak host memory of loading."""
        self._note(load=facts)
        if self.first:
            rate = facts.bytes_read / 1e6 / max(facts.seconds, 1e-9)
            say(
                f"loaded {facts.tensors} tensors, {facts.bytes_read / 1e6:.0f} MB on rank 0 in {facts.seconds:.1f} s "
                f"({rate:.0f} MB/s), peak host {facts.peak_host_bytes / 2**30:.2f} GiB"
            )

    def from_the_start(self) -> None:
        """No save was there: metrics of an earlier attempt are dropped."""
        if self.metrics is not None:
            self.steps, self.evaluations = self.metrics.begin(-1)

    def resumed(self, step: int, notes: tuple[str, ...]) -> None:
        """The run goes on behind a save; metrics of later steps are dropped."""
        if self.metrics is None or self.record is None:
            return
        self.steps, self.evaluations = self.metrics.begin(step)
        warnings = (*self.record.warnings, *notes)
        self._note(resumed_from_steps=(*self.record.resumed_from_steps, step), warnings=warnings)
        for note in notes:
            say(f"warning: {note}")
        say(f"resumed from the save of step {step}")

    def checked(self, checks: tuple[CheckResult, ...]) -> None:
        """Record what was found on rank 0, then end everywhere if a check failed anywhere.

        Raises:
            CheckFailed: on every rank.
        """
        if self.record is not None:
            self._note(checks=record.with_checks(self.record, checks))
            for check in checks:
                say(f"check {check.stage}/{check.name}: {'passed' if check.passed else 'FAILED'} ({check.evidence})")
        together(lambda: require(checks, f"rank {self.ranks.rank}"))

    def evaluated(self, metric: EvalMetric) -> None:
        """A held-out loss; a second one of the same step replaces the first."""
        if self.metrics is not None:
            self.evaluations = [*(one for one in self.evaluations if one.step != metric.step), metric]
            self.metrics.evaluation(metric)

    def stepped(self, metric: StepMetric) -> None:
        """A step that was done."""
        if self.metrics is not None:
            self.steps.append(metric)
            self.metrics.step(metric)

    def took(self, ways: tuple[WayTaken, ...]) -> None:
        """Which ways the operators with several ran so far, as far as this rank tells."""
        if ways and self.record is not None:
            self._note(ways=ways)
            for one in ways:
                say(f"{one.op}: {len(one.modules)} modules ran rows of {one.row_tokens} {one.path}: {one.reason}")

    def warned(self, notes: tuple[str, ...]) -> None:
        """What a person should look at, though the run goes on."""
        if notes and self.record is not None:
            self._note(warnings=(*self.record.warnings, *notes))
            for note in notes:
                say(f"warning: {note}")

    def finished(self, meter: LoadMeter, stopped: int | None) -> None:
        """The run has trained to its end, or to the step at which the held-out loss no longer fell."""
        if stopped is not None and self.first:
            say(f"stopped at step {stopped}: the held-out loss no longer falls")
        loads = tuple(ExpertLoad(layer=layer, tokens=tuple(count.tolist())) for layer, count in meter.total.items())
        self._end(status="trained", expert_loads=loads, stopped_at_step=stopped)

    def _end(self, **fields: Any) -> None:
        """Note how the run ended, with its steps, held-out losses and what they measure."""
        whole = {"steps": tuple(self.steps), "evaluations": tuple(self.evaluations), **record.measured(self.steps)}
        self._note(**whole, **fields)

    def _note(self, **fields: Any) -> None:
        if self.record is not None:
            self.record = RunRecord.model_validate({**self.record.model_dump(), **fields})
            record.write(self.run_dir, self.record)
