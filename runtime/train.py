"""The training loop: micro-batches, one gradient, one clip, one step; identical on every mesh."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime import state
from shardwright.runtime.agree import on_first_rank
from shardwright.runtime.balancing import balancer_for, biases_for, loss_over_ranks
from shardwright.runtime.batches import Batches
from shardwright.runtime.checks.memory import memory_guard
from shardwright.runtime.checks.triage import where_not_finite
from shardwright.runtime.checks.usage import held_bytes
from shardwright.runtime.device import Device
from shardwright.runtime.early_stop import EarlyStop
from shardwright.runtime.evaluate import evaluate
from shardwright.runtime.experts.balance import max_over_mean
from shardwright.runtime.fused_dsa_loss import indexer_loss_for
from shardwright.runtime.garbage import collected_between_steps
from shardwright.runtime.late_faults import raise_late_faults
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.runtime.losses import summed_loss
from shardwright.runtime.mesh import Ranks
from shardwright.runtime.optimizer import AdapterOptimizer, learning_rate
from shardwright.runtime.ownership import sum_copies
from shardwright.runtime.preemption import StopRequest, interrupted
from shardwright.runtime.profile import recording
from shardwright.runtime.session import Live
from shardwright.runtime.whereabouts import Whereabouts
from shardwright.schemas.cost import Moment
from shardwright.schemas.errors import CheckFailed
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import EvalMetric, StepMetric


@dataclass(frozen=True)
class Gradient:
    """What one pass over a global batch gave, before the step: loss per token, norm, rows per expert."""

    loss: float
    norm: float
    loads: dict[str, Tensor]
    balance: float = 0.0
    indexer: float = 0.0


@dataclass
class Trainer:
    """One rank's part of a run."""

    plan: AdaptationPlan
    live: Live
    batches: Batches
    held_out: np.ndarray
    ranks: Ranks
    device: Device
    run_dir: Path
    optimizer: AdapterOptimizer = field(init=False)
    saver: state.Saver = field(init=False)
    resume_notes: tuple[str, ...] = ()
    """What :meth:`resume` decided about damaged saves."""

    def __post_init__(self) -> None:
        self.recipe = self.plan.decision.recipe
        self.strategy = self.plan.decision.strategy
        planes = self.batches.sequences.ndim != 2
        self.balancer = balancer_for(self.plan, self.live.model, self.live.meter, planes)
        self.indexer = indexer_loss_for(self.plan, self.live.model, self.live.meter)
        self.biases = biases_for(self.plan, self.live.model, self.live.meter)
        self.where = Whereabouts(self.ranks, self.run_dir)
        on_host = self.strategy.offload == "adapter_optimizer"
        self.optimizer = AdapterOptimizer(self.live.adapters, self.recipe.optimizer, self.ranks, on_host)
        self.saver = state.Saver(
            self.run_dir, self.plan, self.live.adapters, self.optimizer, self.ranks, self.device, self.router_biases()
        )

    def router_biases(self) -> dict[str, Tensor]:
        """Full name → bias that moves with the loads; empty where all are frozen."""
        return {} if self.biases is None else self.biases.tensors()

    def gradient(self, step: int, cut: Callable[[Tensor], Tensor] = lambda rows: rows) -> Gradient:
        """Forward and backward over this rank's micro-batches of a step; gradients are sums over all ranks.

        Args:
            cut: the part of a micro-batch that runs; all ranks cut alike.

        Raises:
            CheckFailed: ``no-gradient``, ``loss-not-finite``.
            KernelError: what a kernel found in its data (``late_faults``).
            RunError: ``out-of-memory``.
        """
        self.optimizer.clear()
        tokens = self.batches.tokens(step)
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        self._dropout(True)
        with self.live.meter.record():
            for rows in self.batches.micro_batches(step, self.ranks.data_rank):
                total += self._one_micro_batch(cut(rows), tokens)
        self._dropout(False)
        balance = loss_over_ranks(self.balancer, self.ranks, self.device)
        indexer = loss_over_ranks(self.indexer, self.ranks, self.device)
        if self.ranks.world > 1:
            dist.all_reduce(total)
        sum_copies(self.live.adapters, self.ranks)
        norm = self.optimizer.global_norm(self.optimizer.gradients())
        loads = self.live.meter.finish_step()
        raise_late_faults()
        if not np.isfinite(float(total)) or not np.isfinite(norm):
            raise CheckFailed(
                "loss-not-finite",
                f"loss {float(total)}, gradient norm {norm}; {where_not_finite(self, step)}",
                where=f"step {step}",
                next_action="lower the learning rate; `latest` still names the last good save",
            )
        return Gradient(float(total), norm, loads, balance, indexer)

    def _one_micro_batch(self, rows: Tensor, tokens: int) -> Tensor:
        """Forward and backward of rows [micro, …]; its part of the loss.

        Raises:
            RunError: ``out-of-memory``.
        """
        with self.device.attention():
            with self._guarded("forward_peak"):
                loss = summed_loss(self.live.model, rows.to(self.device.torch_device)) / tokens
            with self._guarded("backward_peak"):
                loss.backward()
        return loss.detach().double()

    def apply(self, step: int, gradient: Gradient) -> float:
        """Clip and step, and move the routers' biases where the recipe says so; returns the learning rate.

        Raises:
            RunError: ``out-of-memory``.
            RecipeError: ``balance-choice``.
        """
        rate = learning_rate(step, float(self.recipe.optimizer.learning_rate), self.recipe.schedule)
        with self._guarded("optimizer_step"):
            self.optimizer.step(rate, gradient.norm)
        if self.biases is not None:
            self.biases.move(gradient.loads)
        return rate

    def step(self, step: int, on_gradient: Callable[[int, Gradient], None]) -> tuple[StepMetric, Gradient]:
        """One optimizer step with its measurements; ``on_gradient`` looks at it before it is applied, off the clock."""
        with recording(self.run_dir, step, self.ranks.rank, self.device):
            began = self._clock()
            self.where.at(f"step {step}, forward and backward")
            gradient = self.gradient(step)
            paused = self._clock()
            on_gradient(step, gradient)
            resumed = self._clock()
            self.where.at(f"step {step}, the optimizer")
            rate = self.apply(step, gradient)
            seconds = self._clock() - began - (resumed - paused)
        metric = StepMetric(
            step=step,
            loss=gradient.loss,
            grad_norm=gradient.norm,
            learning_rate=rate,
            tokens=self.recipe.batch.tokens_per_step,
            seconds=seconds,
            peak_memory_bytes=self._peak_over_ranks(),
            expert_load_max_over_mean=max_over_mean(gradient.loads),
            balance_loss=gradient.balance,
            indexer_loss=gradient.indexer,
        )
        return metric, gradient

    def evaluate(self, step: int) -> EvalMetric:
        """Held-out loss now.

        Raises:
            RunError: ``out-of-memory``.
        """
        self.where.at(f"held-out sequences after step {step}")
        with self._guarded("forward_peak"):
            return evaluate(
                self.live.model, self.held_out, step, self.strategy.micro_batch_sequences, self.ranks, self.device
            )

    def start_save(self, step: int) -> Path:
        """Begin a save of this step; training goes on while it is written."""
        self.where.at(f"the save of step {step}")
        tokens = {layer: count.tolist() for layer, count in self.live.meter.total.items()}
        return self.saver.start(step, tokens)

    def save(self, step: int) -> Path:
        """A whole save of this step."""
        folder = self.start_save(step)
        self.saver.finish()
        return folder

    def resume(self) -> int:
        """Load the newest whole save; returns its step, 0 for a fresh run. Damaged newer ones are set aside.

        Raises:
            RunError: ``other-plan``, ``damaged-save``.
        """
        found = on_first_rank(lambda: state.find(self.run_dir, self.plan.hashes))
        if found is None:
            return 0
        self.resume_notes = on_first_rank(lambda: state.set_aside(found))
        held, seed = self.router_biases(), self.recipe.seeds.lora
        state.load(found.folder, found.step, self.live.adapters, self.optimizer, self.ranks, self.device, held, seed)
        self.live.meter.total = state.expert_tokens(found.folder)
        return found.step

    def base_of_save(self, step: int) -> str:
        """Hash of the frozen weights that the save of a step was trained beside; empty where it does not tell."""
        return state.base_of(state.saves(self.run_dir) / f"step-{step}", self.ranks)

    def run(
        self,
        first: int,
        on_gradient: Callable[[int, Gradient], None],
        on_step: Callable[[StepMetric, Gradient], None],
        on_evaluation: Callable[[EvalMetric], None],
        losses: Iterable[float] = (),
    ) -> int | None:
        """Steps ``first`` … last, with the evaluations and saves that the recipe asks for.

        Args:
            losses: held-out losses of the run before this (re)start.

        Returns:
            The step with which the recipe's early stop ended the run, if it did.

        Raises:
            RunInterrupted: a signal asked to stop; the save of the last step done is whole.
            RunError: ``disk-full``.
        """
        schedule = self.recipe.schedule
        patience = EarlyStop(schedule.early_stop_evaluations, losses)
        with StopRequest(self.ranks, self.device) as stop, collected_between_steps() as garbage, self.where:
            for step in range(first, schedule.steps + 1):
                metric, gradient = self.step(step, on_gradient)
                garbage.step()
                on_step(metric, gradient)
                last, asked, ended = step == schedule.steps, stop.agreed(), False
                if last or (not asked and _due(step, schedule.evaluate_every_steps)):
                    held = self.evaluate(step)
                    on_evaluation(held)
                    ended = patience.after(held.loss) and not last
                if last or asked or ended or _due(step, schedule.save_every_steps):
                    self.start_save(step)
                if ended:
                    self.saver.finish()
                    return step
                if asked and not last:
                    self.saver.finish()
                    raise interrupted(step, schedule.steps, str(self.run_dir))
            self.saver.finish()
        return None

    def held(self) -> dict[str, int]:
        """What this rank's named tensors take, by component of the memory model, bytes."""
        return held_bytes(self.live.model, self.live.parameters, self.optimizer.inner.state.values())

    def _guarded(self, moment: Moment) -> AbstractContextManager[None]:
        return memory_guard(self.plan, self.device, moment, self.held)

    def _peak_over_ranks(self) -> int:
        peak = torch.tensor(self.device.peak_memory_bytes(), device=self.device.torch_device)
        if self.ranks.world > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return int(peak)

    def _clock(self) -> float:
        self.device.synchronize()
        return time.monotonic()

    def _dropout(self, on: bool) -> None:
        if float(self.recipe.lora.dropout) == 0:
            return
        for module in self.live.model.modules():
            if isinstance(module, LoraLinear):
                module.training = on


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
