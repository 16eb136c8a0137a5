"""The training loop: micro-batches, one gradient, one clip, one step; identical on every mesh."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime import state
from shardwright.runtime.data import Batches
from shardwright.runtime.device import Device
from shardwright.runtime.evaluate import evaluate
from shardwright.runtime.experts.balance import max_over_mean
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.runtime.losses import predicted_tokens, summed_loss
from shardwright.runtime.mesh import Ranks
from shardwright.runtime.optimizer import AdapterOptimizer, learning_rate
from shardwright.runtime.session import Live
from shardwright.schemas.errors import CheckFailed
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.run import EvalMetric, StepMetric


@dataclass(frozen=True)
class Gradient:
    """What one pass over a global batch gave, before the step: loss per token, norm, rows per expert."""

    loss: float
    norm: float
    loads: dict[str, Tensor]


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

    def __post_init__(self) -> None:
        self.recipe = self.plan.decision.recipe
        self.strategy = self.plan.decision.strategy
        self.optimizer = AdapterOptimizer(self.live.adapters, self.recipe.optimizer, self.ranks)

    def gradient(self, step: int) -> Gradient:
        """Forward and backward over this rank's micro-batches of a step; gradients are sums over all ranks.

        Raises:
            CheckFailed: ``no-gradient``, ``loss-not-finite``.
        """
        self.optimizer.clear()
        tokens = predicted_tokens(self.recipe.batch.global_batch_sequences, self.recipe.batch.sequence_tokens)
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        self._dropout(True)
        with self.live.meter.record():
            for ids in self.batches.micro_batches(step, self.ranks.data_rank):
                loss = summed_loss(self.live.model, ids.to(self.device.torch_device)) / tokens
                loss.backward()
                total += loss.detach().double()
        self._dropout(False)
        if self.ranks.world > 1:
            dist.all_reduce(total)
        loads = self.live.meter.finish_step()
        norm = self.optimizer.global_norm(self.optimizer.gradients())
        if not np.isfinite(float(total)) or not np.isfinite(norm):
            raise CheckFailed(
                "loss-not-finite",
                f"loss {float(total)}, gradient norm {norm}",
                where=f"step {step}",
                next_action="lower the learning rate; `latest` still names the last good save",
            )
        return Gradient(float(total), norm, loads)

    def apply(self, step: int, gradient: Gradient) -> float:
        """Clip and step; returns the learning rate."""
        rate = learning_rate(step, float(self.recipe.optimizer.learning_rate), self.recipe.schedule)
        self.optimizer.step(rate, gradient.norm)
        return rate

    def step(self, step: int, on_gradient: Callable[[int, Gradient], None]) -> tuple[StepMetric, Gradient]:
        """One optimizer step with its measurements; ``on_gradient`` looks at it before it is applied, off the clock."""
        began = self._clock()
        gradient = self.gradient(step)
        paused = self._clock()
        on_gradient(step, gradient)
        resumed = self._clock()
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
        )
        return metric, gradient

    def evaluate(self, step: int) -> EvalMetric:
        """Held-out loss now."""
        return evaluate(
            self.live.model, self.held_out, step, self.strategy.micro_batch_sequences, self.ranks, self.device
        )

    def save(self, step: int) -> Path:
        """A whole save of this step."""
        tokens = {layer: count.tolist() for layer, count in self.live.meter.total.items()}
        return state.save(
            self.run_dir, step, self.live.adapters, self.optimizer, self.ranks, self.device, self.plan.hashes, tokens
        )

    def resume(self) -> int:
        """Load the newest save; returns its step, 0 for a fresh run.

        Raises:
            RunError: ``other-plan``, ``damaged-save``.
        """
        found = state.latest(self.run_dir, self.plan.hashes)
        if found is None:
            return 0
        step, folder = found
        state.load(folder, step, self.live.adapters, self.optimizer, self.ranks, self.device)
        self.live.meter.total = state.expert_tokens(folder)
        return step

    def run(
        self,
        first: int,
        on_gradient: Callable[[int, Gradient], None],
        on_step: Callable[[StepMetric, Gradient], None],
        on_evaluation: Callable[[EvalMetric], None],
    ) -> None:
        """Steps ``first`` … last, with the evaluations and saves that the recipe asks for."""
        schedule = self.recipe.schedule
        for step in range(first, schedule.steps + 1):
            metric, gradient = self.step(step, on_gradient)
            on_step(metric, gradient)
            last = step == schedule.steps
            if last or _due(step, schedule.evaluate_every_steps):
                on_evaluation(self.evaluate(step))
            if last or _due(step, schedule.save_every_steps):
                self.save(step)

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
