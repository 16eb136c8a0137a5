"""From an approved plan to trained adapters, on this rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from shardwright.runtime import probe, record, state
from shardwright.runtime.agree import on_first_rank, together
from shardwright.runtime.batches import Batches
from shardwright.runtime.checks.compare import require
from shardwright.runtime.checks.first_step import FirstStep
from shardwright.runtime.checks.memory import memory_guard
from shardwright.runtime.checks.watch import Watch
from shardwright.runtime.data import load_images, load_sequences
from shardwright.runtime.device import Device, open_device
from shardwright.runtime.images import attach_images, behind
from shardwright.runtime.launch.options import read_options
from shardwright.runtime.launch.process import RunLock
from shardwright.runtime.mesh import Ranks, open_mesh
from shardwright.runtime.metrics import Metrics, say
from shardwright.runtime.preflight.run import preflight
from shardwright.runtime.preflight.run import require as require_preflight
from shardwright.runtime.preflight.run import warnings as preflight_warnings
from shardwright.runtime.session import Live, build
from shardwright.runtime.train import Gradient, Trainer
from shardwright.runtime.verify import verify_plan_against_world
from shardwright.schemas.approval import find_approval, verify_approval
from shardwright.schemas.errors import RunInterrupted
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.schemas.run import CheckResult, EvalMetric, ExpertLoad, RunRecord, StepMetric

PLAN_COPY = "plan.json"
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Longest wait in a collective: rank 0 works alone during the single-process reference."""


def execute(plan_path: Path, approvals: Path, checkpoint: Path, recipe_root: Path, run_dir: Path) -> None:
    """Verify, then train.

    Raises:
        PlanError, ApprovalError, StalePlanError: the plan may not run here.
        ClusterError, CheckpointError, RecipeError, LegalityError, RunError: it cannot.
        CheckFailed: it ran and a check did not hold.
    """
    plan = approved_plan(plan_path, approvals)
    verify_plan_against_world(plan, checkpoint, recipe_root)
    device = start_ranks(plan)
    lock = RunLock(run_dir, ".worker.lock")
    try:
        on_first_rank(lambda: lock.acquire(wait_s=20.0))
        if on_first_rank(lambda: finished(plan, run_dir)):
            say(f"{run_dir} holds this plan's finished run; nothing to do")
            return
        ranks = open_mesh(plan.decision.strategy.mesh, device)
        _Run(plan, checkpoint, recipe_root, run_dir, ranks, device).go(plan_path)
    finally:
        lock.release()


def approved_plan(path: Path, approvals: Path) -> AdaptationPlan:
    """The plan, if its bytes are whole and its last verdict allows it.

    Raises:
        PlanError, ApprovalError.
    """
    plan = load_plan(path)
    verify_approval(plan, find_approval(approvals, plan))
    return plan


def finished(plan: AdaptationPlan, run_dir: Path) -> bool:
    """Whether the run directory already holds the whole run of this plan."""
    if not (run_dir / record.FILE).is_file() or not probe.path(run_dir).is_file():
        return False
    kept = record.read(run_dir)
    found = state.latest(run_dir, plan.hashes)
    wanted = plan.decision.recipe.schedule.steps if kept.stopped_at_step is None else kept.stopped_at_step
    complete = found is not None and found[0] == wanted
    return complete and kept.decision_sha256 == plan.hashes.decision and kept.status in ("trained", "exported")


def start_ranks(plan: AdaptationPlan) -> Device:
    """Device and process group of this rank."""
    device = open_device(plan.decision.cluster.device_type, int(os.environ.get("LOCAL_RANK", "0")))
    if device.kind == "cpu" and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not dist.is_initialized():
        dist.init_process_group(device.backend, timeout=COLLECTIVE_TIMEOUT)
    return device


def close(failed: bool) -> None:
    """Leave the process group: together after success; a rank that failed waits for nobody."""
    if not dist.is_initialized():
        return
    if not failed:
        dist.barrier()
        dist.destroy_process_group()
    elif dist.get_backend() == "gloo":
        dist.destroy_process_group()


class _Run:
    """The steps of one run on one rank."""

    def __init__(
        self, plan: AdaptationPlan, checkpoint: Path, recipe_root: Path, run_dir: Path, ranks: Ranks, device: Device
    ) -> None:
        self.plan, self.checkpoint, self.root, self.run_dir = plan, checkpoint, recipe_root, run_dir
        self.ranks, self.device = ranks, device
        self.recipe = plan.decision.recipe
        self.first = ranks.rank == 0
        self.metrics: Metrics | None = None
        self.record: RunRecord | None = None
        self.steps: list[StepMetric] = []
        self.evaluations: list[EvalMetric] = []

    def go(self, plan_path: Path) -> None:
        """All of it; a failure is written into the record before it is raised."""
        try:
            self._begin(plan_path)
            self._preflight()
            live = together(self._built)
            self._loaded(live)
            self._train(live)
        except BaseException as error:
            if self.record is not None:
                stopped = isinstance(error, RunInterrupted)
                self._note(status="interrupted" if stopped else "failed", failure="" if stopped else str(error)[:2000])
            raise
        finally:
            if self.metrics is not None:
                self.metrics.close()

    def _begin(self, plan_path: Path) -> None:
        if not self.first:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if plan_path.resolve() != (self.run_dir / PLAN_COPY).resolve():
            shutil.copyfile(plan_path, self.run_dir / PLAN_COPY)
        self.metrics = Metrics(
            self.run_dir,
            self.recipe.schedule.steps,
            {"run": self.recipe.name, "decision": self.plan.hashes.decision[:16]},
        )
        before = record.read(self.run_dir) if (self.run_dir / record.FILE).is_file() else None
        self.record = record.start(self.plan, self.device.name)
        if before is not None and before.decision_sha256 == self.record.decision_sha256:
            self.record = before.model_copy(update={"status": "running", "failure": ""})
        record.write(self.run_dir, self.record)
        say(f"plan {self.plan.hashes.decision[:12]}: {self.plan.decision.strategy.text()}, {self.ranks.world} ranks")

    def _preflight(self) -> None:
        if not on_first_rank(lambda: read_options(self.run_dir).preflight):
            return
        results = preflight(self.plan, self.device, self.run_dir)
        if self.record is not None:
            notes = preflight_warnings(results)
            self._note(preflight=results, warnings=(*self.record.warnings, *notes))
            for one in results:
                say(f"preflight {one.name}: {'passed' if one.passed else 'FAILED'} ({one.where}: {one.evidence})")
        require_preflight(results)

    def _progress(self) -> Callable[[int, int, float], None] | None:
        if not self.first:
            return None
        shown = [0.0]

        def progress(bytes_read: int, tensors: int, seconds: float) -> None:
            if seconds - shown[0] >= 2.0:
                shown[0] = seconds
                say(f"loading: {tensors} tensors, {bytes_read / 1e6:.0f} MB, {bytes_read / 1e6 / seconds:.0f} MB/s")

        return progress

    def _built(self) -> Live:
        with memory_guard(self.plan, self.device, "load"):
            return build(self.plan, self.checkpoint, self.ranks, self.device, self._progress())

    def _loaded(self, live: Live) -> None:
        facts = live.load
        self._note(load=facts)
        if self.first:
            rate = facts.bytes_read / 1e6 / max(facts.seconds, 1e-9)
            say(
                f"loaded {facts.tensors} tensors, {facts.bytes_read / 1e6:.0f} MB on rank 0 in {facts.seconds:.1f} s "
                f"({rate:.0f} MB/s), peak host {facts.peak_host_bytes / 2**30:.2f} GiB"
            )

    def _train(self, live: Live) -> None:
        trainer = self._trainer(live)
        done = trainer.resume()
        guard = FirstStep(trainer) if done == 0 else None
        if guard is None:
            self._resumed(done, trainer.resume_notes)
        else:
            if self.metrics is not None:
                self.metrics.begin(-1)
            self._checked(guard.before())
            self.device.reset_peak_memory()
            self._evaluated(trainer.evaluate(0))

        def on_gradient(step: int, gradient: Gradient) -> None:
            if guard is not None and step == 1:
                self._checked(guard.on_gradient(gradient))

        watch = Watch(trainer, guard.base_before if guard is not None else None)

        def on_step(metric: StepMetric, gradient: Gradient) -> None:
            self._stepped(metric)
            self._warned(watch.after(metric, gradient))
            if guard is not None and metric.step == 1:
                self._checked(guard.after(gradient))
            if due := watch.checks(metric.step):
                self._checked(due)

        losses = on_first_rank(lambda: [one.loss for one in self.evaluations])
        stopped = trainer.run(done + 1, on_gradient, on_step, self._evaluated, losses)
        if guard is not None:
            self._checked(guard.at_end())
        probe.save_reference_logits(trainer)
        self._finish(live, stopped)

    def _trainer(self, live: Live) -> Trainer:
        batch, strategy, data = self.recipe.batch, self.plan.decision.strategy, self.recipe.data
        cache = self.run_dir / "data"

        def sequences(name: str, wanted: int) -> np.ndarray:
            config = live.files.config
            return load_sequences(self.root / name, self.recipe, self.checkpoint, config, cache, wanted)

        held_out = self.recipe.schedule.held_out_sequences

        def both() -> tuple[np.ndarray, np.ndarray]:
            return sequences(data.train, 1), sequences(data.held_out, held_out)[:held_out]

        on_first_rank(lambda: len(both()))
        train, held = together(both)
        if data.images_field:
            held = together(lambda: self._attach(live, held))
        batches = Batches(
            train,
            batch.global_batch_sequences,
            strategy.mesh.data_ranks,
            strategy.micro_batch_sequences,
            self.recipe.seeds.data,
        )
        return Trainer(self.plan, live, batches, held, self.ranks, self.device, self.run_dir)

    def _attach(self, live: Live, held: np.ndarray) -> np.ndarray:
        """Give the model the images of both data files; the held-out rows with their images' numbers in it."""
        data, config, cache = self.recipe.data, live.files.config, self.run_dir / "data"
        names = (data.train, data.held_out)
        train, later = (load_images(self.root / name, self.recipe, self.checkpoint, config, cache) for name in names)
        attach_images(live.model, train + later)
        return behind(held, train)

    def _resumed(self, step: int, notes: tuple[str, ...]) -> None:
        if self.metrics is None or self.record is None:
            return
        self.steps, self.evaluations = self.metrics.begin(step)
        warnings = (*self.record.warnings, *notes)
        self._note(resumed_from_steps=(*self.record.resumed_from_steps, step), warnings=warnings)
        for note in notes:
            say(f"warning: {note}")
        say(f"resumed from the save of step {step}")

    def _checked(self, checks: tuple[CheckResult, ...]) -> None:
        """Record what was found on rank 0, then end everywhere if a check failed anywhere."""
        if self.record is not None:
            self._note(checks=record.with_checks(self.record, checks))
            for check in checks:
                say(f"check {check.stage}/{check.name}: {'passed' if check.passed else 'FAILED'} ({check.evidence})")
        together(lambda: require(checks, f"rank {self.ranks.rank}"))

    def _evaluated(self, metric: EvalMetric) -> None:
        if self.metrics is not None:
            self.evaluations = [*(one for one in self.evaluations if one.step != metric.step), metric]
            self.metrics.evaluation(metric)
            self._note(evaluations=tuple(self.evaluations))

    def _stepped(self, metric: StepMetric) -> None:
        if self.metrics is not None:
            self.steps.append(metric)
            self.metrics.step(metric)
            self._note(steps=tuple(self.steps), **record.measured(self.steps))

    def _warned(self, notes: tuple[str, ...]) -> None:
        if notes and self.record is not None:
            self._note(warnings=(*self.record.warnings, *notes))
            for note in notes:
                say(f"warning: {note}")

    def _finish(self, live: Live, stopped: int | None) -> None:
        if stopped is not None and self.first:
            say(f"stopped at step {stopped}: the held-out loss no longer falls")
        total = live.meter.total
        loads = tuple(ExpertLoad(layer=layer, tokens=tuple(count.tolist())) for layer, count in total.items())
        self._note(status="trained", expert_loads=loads, stopped_at_step=stopped)
        if self.ranks.world > 1:
            dist.barrier()

    def _note(self, **fields: Any) -> None:
        if self.record is not None:
            self.record = RunRecord.model_validate({**self.record.model_dump(), **fields})
            record.write(self.run_dir, self.record)
