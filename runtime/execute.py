"""From an approved plan to trained adapters, on this rank."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch.distributed as dist

from shardwright.checkpoints.config import read_config
from shardwright.runtime import probe, record, state
from shardwright.runtime.agree import on_first_rank, together
from shardwright.runtime.approved import approved_plan, head_of, unheaded
from shardwright.runtime.batches import Batches
from shardwright.runtime.checks.first_step import FirstStep
from shardwright.runtime.checks.load import same_base
from shardwright.runtime.checks.memory import memory_guard
from shardwright.runtime.checks.step import base_digests, digest_of_base
from shardwright.runtime.checks.watch import Watch
from shardwright.runtime.data import load_images, load_sequences
from shardwright.runtime.device import Device, open_device, reset_peak_host
from shardwright.runtime.fused_dsa_ways import ways_taken
from shardwright.runtime.images import attach_images, behind
from shardwright.runtime.launch.options import read_options
from shardwright.runtime.launch.process import RunLock
from shardwright.runtime.mesh import Ranks, open_mesh
from shardwright.runtime.metrics import say
from shardwright.runtime.preflight.run import preflight
from shardwright.runtime.preflight.run import require as require_preflight
from shardwright.runtime.profile import asked_step
from shardwright.runtime.records import shared_records
from shardwright.runtime.run_log import RunLog
from shardwright.runtime.session import Live, build
from shardwright.runtime.train import Gradient, Trainer
from shardwright.runtime.verify import unpinned, verify_plan_against_world
from shardwright.schemas.log_head import LogHead
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import StepMetric

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
        head = on_first_rank(lambda: head_of(approvals, plan, run_dir))
        if on_first_rank(lambda: finished(plan, run_dir)):
            say(f"{run_dir} holds this plan's finished run; nothing to do")
            return
        ranks = open_mesh(plan.decision.strategy.mesh, device)
        run = _Run(plan, checkpoint, recipe_root, run_dir, ranks, device)
        run.go(head, (*unheaded(approvals), *unpinned(plan.decision)))
    finally:
        lock.release()


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
    """The order of work of one run on one rank; ``log`` keeps its account."""

    def __init__(
        self, plan: AdaptationPlan, checkpoint: Path, recipe_root: Path, run_dir: Path, ranks: Ranks, device: Device
    ) -> None:
        self.plan, self.checkpoint, self.root, self.run_dir = plan, checkpoint, recipe_root, run_dir
        self.ranks, self.device = ranks, device
        self.recipe = plan.decision.recipe
        self.log = RunLog(plan, run_dir, ranks, device.name)

    def go(self, head: LogHead, notes: tuple[str, ...]) -> None:
        """All of it; a failure is written into the record before it is raised.

        Args:
            head: how far the approvals log reaches.
            notes: decisions that were taken before the run.
        """
        log = self.log
        try:
            log.begin(head, notes)
            asked_step(self.recipe.schedule.steps)
            self._preflight()
            rows = self._rows()
            live = together(self._built)
            log.loaded(live.load)
            self._train(live, rows)
        except BaseException as error:
            log.failed(error)
            raise
        finally:
            log.close()

    def _preflight(self) -> None:
        if not on_first_rank(lambda: read_options(self.run_dir).preflight):
            return
        results = preflight(self.plan, self.device, self.run_dir)
        self.log.preflight(results)
        require_preflight(results)

    def _built(self) -> Live:
        with memory_guard(self.plan, self.device, "load"):
            return build(self.plan, self.checkpoint, self.ranks, self.device, self.log.progress())

    def _rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Training and held-out sequences, read by rank 0 and then taken from its cache by all.

        Read before the weights: data that cannot train is told before terabytes are loaded.
        """
        config, cache = read_config(self.checkpoint), self.run_dir / "data"
        data, wanted = self.recipe.data, self.recipe.schedule.held_out_sequences

        notes: list[str] = []

        def sequences(name: str, least: int) -> np.ndarray:
            return load_sequences(self.root / name, self.recipe, self.checkpoint, config, cache, least, notes.append)

        def both() -> tuple[np.ndarray, np.ndarray]:
            return sequences(data.train, 1), sequences(data.held_out, wanted)[:wanted]

        on_first_rank(lambda: len(both()))
        self.log.warned(tuple(notes))
        self.log.warned(on_first_rank(lambda: shared_records(self.root / data.train, self.root / data.held_out, data)))
        rows = together(both)
        reset_peak_host()
        return rows

    def _train(self, live: Live, rows: tuple[np.ndarray, np.ndarray]) -> None:
        log, trainer = self.log, self._trainer(live, *rows)
        done = trainer.resume()
        guard = FirstStep(trainer) if done == 0 else None
        if guard is None:
            log.resumed(done, trainer.resume_notes)
            base = base_digests(live.model, live.parameters, trainer.router_biases())
            trainer.saver.base = digest_of_base(base)
            log.checked(same_base(trainer.base_of_save(done), trainer.saver.base))
        else:
            log.from_the_start()
            log.checked(guard.before())
            base = guard.base_before
            trainer.saver.base = digest_of_base(base)
            self.device.reset_peak_memory()
            log.evaluated(trainer.evaluate(0))
            self.device.manual_seed(state.draw_seed(self.recipe.seeds.lora, 0, self.ranks.rank))

        def on_gradient(step: int, gradient: Gradient) -> None:
            if guard is not None and step == 1:
                log.checked(guard.on_gradient(gradient))

        watch = Watch(trainer, base)

        def on_step(metric: StepMetric, gradient: Gradient) -> None:
            log.stepped(metric)
            log.warned(watch.after(metric, gradient))
            if metric.step == done + 1:
                log.took(ways_taken(live.model))
            if guard is not None and metric.step == 1:
                log.checked(guard.after(gradient))
            if due := watch.checks(metric.step):
                log.checked(due)

        losses = on_first_rank(lambda: [one.loss for one in log.evaluations])
        stopped = trainer.run(done + 1, on_gradient, on_step, log.evaluated, losses)
        log.checked(watch.at_end())
        probe.save_reference_logits(trainer)
        log.finished(live.meter, stopped)
        if self.ranks.world > 1:
            dist.barrier()

    def _trainer(self, live: Live, train: np.ndarray, held: np.ndarray) -> Trainer:
        batch, strategy = self.recipe.batch, self.plan.decision.strategy
        if self.recipe.data.images_field:
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
