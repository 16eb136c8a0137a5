"""The checks around the first step, in order: reference, loss and norm before the step is applied, then its effect."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.agree import on_first_rank
from shardwright.runtime.balancing import put_on
from shardwright.runtime.checks.context import context_equal
from shardwright.runtime.checks.documents import documents_apart
from shardwright.runtime.checks.fusions import fusions_equal
from shardwright.runtime.checks.layers import layers_equal
from shardwright.runtime.checks.load import all_loaded, same_loss
from shardwright.runtime.checks.memory import check_guard
from shardwright.runtime.checks.room import whole_model_fits
from shardwright.runtime.checks.step import (
    adapters_moved,
    base_digests,
    base_unchanged,
    biases_agree,
    gradients_present,
    replicas_agree,
    same_norm,
)
from shardwright.runtime.images import share_images
from shardwright.runtime.lora.init import initial_box
from shardwright.runtime.lora.inject import adapter_names, adapter_shapes
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.runtime.metrics import say
from shardwright.runtime.parallelize import DTYPES
from shardwright.runtime.reference import ReferenceStep, add_plain_lora, load_plain, reference_step
from shardwright.runtime.train import Gradient, Trainer
from shardwright.schemas.run import CheckResult


class FirstStep:
    """Holds what must be compared across the first step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.live = trainer, trainer.live
        self.base = trainer.recipe.precision.base
        self.reference: ReferenceStep | None = None
        self.undropped: Gradient | None = None
        self.base_before: dict[str, tuple[int, int]] = {}
        self.b_before: dict[str, Tensor] = {}

    def before(self) -> tuple[CheckResult, ...]:
        """After load: everything finite. Then the reference of the first batch, in one process, where it fits.

        Raises:
            RunError: ``check-out-of-memory``, ``check-no-room``; and as a training step.
        """
        with check_guard(self.trainer.device, "the loaded model was checked"):
            return self._before()

    def _before(self) -> tuple[CheckResult, ...]:
        loaded = all_loaded(self.live.model)
        sound = on_all(loaded.passed)
        self.base_before = self._base()
        self.b_before = {
            name: owned.local().clone() for name, owned in self.live.adapters.items() if name.endswith("lora_b")
        }
        if not sound:
            return (loaded,)
        fused = (*documents_apart(self.trainer), *context_equal(self.trainer), *fusions_equal(self.trainer))
        if on_first_rank(self._whole_fits):
            self.reference = on_first_rank(self._reference)
            self.undropped = self._undropped()
            return (loaded, *fused)
        return (loaded, *fused, *layers_equal(self.trainer))

    def _base(self) -> dict[str, tuple[int, int]]:
        """Digests of what must not change: all but adapters and the biases that the recipe moves."""
        return base_digests(self.live.model, self.live.parameters, self.trainer.router_biases())

    def _whole_fits(self) -> bool:
        parameters = sum(torch.Size(shape).numel() for shape in self.live.files.names.shapes.values())
        fits, why = whole_model_fits(parameters * DTYPES[self.base].itemsize, self.trainer.device)
        say(f"reference: {why}, {'it is run whole' if fits else 'each kind of layer is compared alone'}")
        return fits

    def _reference(self) -> ReferenceStep:
        """Plain transformers and plain LoRA over the first global batch; other ranks wait, so all cores are used."""
        try:
            with check_guard(self.trainer.device, "the whole plain model ran"):
                return self._plain_step()
        finally:
            self.trainer.device.release()

    def _plain_step(self) -> ReferenceStep:
        files, decision = self.live.files, self.trainer.plan.decision
        device = self.trainer.device.torch_device
        threads = torch.get_num_threads()
        torch.set_num_threads(threads * (self.trainer.ranks.world if device.type == "cpu" else 1))
        try:
            model, _ = load_plain(files.folder, DTYPES[self.base], device)
            share_images(self.live.model, model)
            adapters = initial_adapters(self.trainer)
            leaves = add_plain_lora(model, decision.lora_targets, adapters, files.config.text_model_type)
            rows, attached = 1, None
            if self.trainer.balancer is not None:
                put_on(self.trainer.plan, model, self.trainer.balancer.layers, self.live.meter)
                rows = self.trainer.strategy.micro_batch_sequences
            if self.trainer.indexer is not None:
                attached = self.trainer.indexer.put_on_plain(model)
                rows = self.trainer.strategy.micro_batch_sequences
            return reference_step(model, leaves, self.trainer.batches.global_batch(1), device, rows, attached)
        finally:
            torch.set_num_threads(threads)

    def _undropped(self) -> Gradient | None:
        """The first batch once more without dropout, whose draws no reference could repeat; ``None`` where it has none.

        Counts of rows stay as they were, so the run goes on as if this pass had not been.
        """
        dropped = [one for one in self.live.model.modules() if isinstance(one, LoraLinear) and one.dropout > 0]
        if not dropped:
            return None
        rate, rows = dropped[0].dropout, dict(self.live.meter.total)
        try:
            for one in dropped:
                one.dropout = 0.0
            return self.trainer.gradient(1)
        finally:
            for one in dropped:
                one.dropout = rate
            self.live.meter.total = rows
            self.trainer.optimizer.clear()

    def on_gradient(self, gradient: Gradient) -> tuple[CheckResult, ...]:
        """Loss and gradient norm of the first batch, before anything is changed; without dropout where there is one."""
        present = gradients_present(self.live.parameters, gradient.loads, self._unlabelled())
        if self.reference is None:
            return (present,)
        gradient = self.undropped or gradient
        return (
            present,
            same_loss(gradient.loss, self.reference.loss, self.base),
            same_norm(gradient.norm, self.reference.grad_norm, self.base),
        )

    def _unlabelled(self) -> int:
        """Tokens of the first step that predict nothing: last ones, padding, questions."""
        return self.trainer.recipe.batch.tokens_per_step - self.trainer.batches.tokens(1)

    def after(self, gradient: Gradient) -> tuple[CheckResult, ...]:
        """What the step changed, and what it must not have changed."""
        parameters = self.live.parameters
        return (
            adapters_moved(self.b_before, parameters, gradient.loads, self._unlabelled()),
            base_unchanged(self.base_before, self._base()),
            replicas_agree(parameters, self.trainer.ranks),
            *biases_agree(self.trainer.router_biases(), self.trainer.ranks),
        )


def initial_adapters(trainer: Trainer) -> dict[str, Tensor]:
    """Whole adapters as they are before the first step, made again from their seeds."""
    recipe = trainer.recipe
    made = {}
    for target in trainer.plan.decision.lora_targets:
        for name, shape in zip(adapter_names(target), adapter_shapes(target), strict=True):
            box = tuple((0, size) for size in shape)
            value = initial_box(recipe.seeds.lora, name, shape, box)
            made[name] = value.to(trainer.device.torch_device, DTYPES[recipe.precision.adapter])
    return made


def on_all(passed: bool) -> bool:
    """Whether every rank passed."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return passed
    seen: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(seen, passed)
    return all(seen)
