"""The indexers' own loss: how far their softmaxed scores are from the attention over the keys that they selected.

``KL(p ‖ softmax(I))`` per token, p the attention's probabilities summed over heads and normalised: over the selected
keys, over the selected pools where an indexer scores pools, or over all keys in the dense warm-up, in which layers
attend to all. Hidden states and queries that the indexer reads, and the attention that it learns from, are detached.
The value joins nothing; its gradient joins the backward of its layer, so it works under activation checkpointing. It
is the mean over a micro-batch's tokens times that batch's share of the step, summed over layers with an indexer of
their own. Source: DeepSeek-V3.2, both training stages.
Legend: B rows, S tokens a row, T = B · S, H heads, J indexer heads, D indexer width, K selected keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.fused_dsa_layer import LEARNER, SETTINGS, SparseAttention
from shardwright.runtime.fused_dsa_plain import attach_plain, follow
from shardwright.runtime.fused_dsa_pooled import PooledSparseAttention
from shardwright.runtime.lora.inject import is_adapter
from shardwright.schemas.errors import LegalityError, RecipeError
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.recipe import IndexerSpec


class _Attach(torch.autograd.Function):
    """The first input as it is; in backward the second gets a gradient of one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.like


@dataclass
class IndexerLoss:
    """The loss of a run's sparse attentions, and what else its recipe says of them; their modules keep both."""

    coefficient: float
    share: float
    """A micro-batch's sequences over those of the step."""
    meter: LoadMeter
    layers: tuple[SparseAttention, ...]
    """Those whose indexer learns."""
    settings: IndexerSpec = field(default_factory=IndexerSpec)
    told: tuple[SparseAttention, ...] = ()
    """Those that the settings are for."""
    total: Tensor | None = None

    def attach(self, value: Tensor, loss: Tensor) -> Tensor:
        """``value``, whose backward also is that of this layer's loss; counted once where a forward is repeated."""
        loss = loss * (self.coefficient * self.share)
        if self.meter.recording:
            self.total = loss.detach() if self.total is None else self.total + loss.detach()
        joined: Tensor = _Attach.apply(value, loss)
        return joined

    def take(self) -> Tensor | None:
        """The losses since the last call, as they are scaled, on this rank; ``None`` where nothing ran."""
        total, self.total = self.total, None
        return total

    def put_on(self) -> None:
        """Make the layers do as the recipe says, and attach their losses."""
        for layer in self.told:
            layer.module.__dict__[SETTINGS] = self.settings
        for layer in self.layers:
            layer.module.__dict__[LEARNER] = self

    @contextmanager
    def silent(self) -> Iterator[None]:
        """While open, no loss is attached: a check by layer compares the gradient of what comes from behind alone."""
        for layer in self.layers:
            layer.module.__dict__.pop(LEARNER, None)
        try:
            yield
        finally:
            self.put_on()

    def follow_plain(self, model: nn.Module) -> None:
        """Make the indexers of a plain model select what those of the live one do."""
        for layer in self.told:
            plain = _beside(layer, model)
            plain.module.__dict__[SETTINGS] = self.settings
            follow(layer, plain)

    def put_on_plain(self, model: nn.Module) -> IndexerLoss:
        """The same on the plain model of the first step's check, in plain torch.

        Returns:
            What is attached there; its ``share`` is for the reference to set, which cuts a batch as it likes.
        """
        self.follow_plain(model)
        uncounted = replace(self, meter=LoadMeter())
        for layer in self.layers:
            plain = _beside(layer, model)
            plain.module.__dict__[LEARNER] = uncounted
            attach_plain(plain)
        return uncounted

    def stand_by(self) -> None:
        """Have the live layers do the same while their fusions are off: a check compares both ways of one step."""
        for layer in self.told:
            follow(layer, layer)
        for layer in self.layers:
            attach_plain(layer)


def _beside(layer: SparseAttention, model: nn.Module) -> SparseAttention:
    """The same layer of another model."""
    return replace(layer, module=model.get_submodule(layer.name))


def indexer_loss_for(plan: AdaptationPlan, model: nn.Module, meter: LoadMeter) -> IndexerLoss | None:
    """What the recipe says of indexers, put on the live model; ``None`` where it says nothing.

    Raises:
        LegalityError: ``indexer-loss-unfused`` where an indexer is not run by the operator; ``indexer-stage-dense``
            where a layer cannot attend to all keys, or its indexer scores pools of keys.
        RecipeError: ``indexer-loss-frozen`` where no adapter lies on any indexer; ``indexer-none`` where there is none.
    """
    recipe = plan.decision.recipe
    spec = recipe.indexer
    if spec == IndexerSpec():
        return None
    layers = fused_layers(model)
    own = tuple(layer for layer in layers if not layer.shared)
    learns = float(spec.loss) > 0
    _require_fused(model, own)
    if learns:
        _require_adapters(model, own)
    elif not own:
        raise RecipeError(
            "indexer-none",
            "the recipe sets how indexers score or attend, and no layer has one that our operator runs",
            where="recipe.indexer",
            next_action="leave recipe.indexer out for this checkpoint",
        )
    if spec.stage == "dense":
        _require_dense(layers)
    share = plan.decision.strategy.micro_batch_sequences / recipe.batch.global_batch_sequences
    made = IndexerLoss(float(spec.loss), share, meter, own if learns else (), spec, layers)
    made.put_on()
    made.stand_by()
    return made


def _require_fused(model: nn.Module, own: tuple[SparseAttention, ...]) -> None:
    indexers = {name.rpartition(".")[0] for name, _ in model.named_modules() if name.endswith(".indexer")}
    if left := sorted(indexers - {layer.name for layer in own}):
        raise LegalityError(
            "indexer-loss-unfused",
            f"{len(left)} of {len(indexers)} indexers run as the family wrote them, first {left[0]}: without gradients",
            where="recipe.indexer",
            next_action="accept the dsa proposals for all layers, or leave recipe.indexer out",
        )


def _require_adapters(model: nn.Module, own: tuple[SparseAttention, ...]) -> None:
    adapters = [name for name, _ in model.named_parameters() if is_adapter(name) and ".indexer." in name]
    if not own or not adapters:
        raise RecipeError(
            "indexer-loss-frozen",
            f"{len(own)} layers have an indexer, and {len(adapters)} adapters lie on one: nothing would learn",
            where="recipe.indexer.loss",
            next_action="add the target *.indexer.wq_b (or wk, weights_proj), or set the coefficient to 0",
        )


def _require_dense(layers: tuple[SparseAttention, ...]) -> None:
    """The warm-up wants attention to all keys, whose target is one over keys."""
    sinks = [layer.name for layer in layers if "sinks" in layer.roles]
    pools = [layer.name for layer in layers if isinstance(layer, PooledSparseAttention)]
    for names, why in (
        (sinks, "attend with sinks, which dense attention takes none of"),
        (pools, "score pools of keys"),
    ):
        if names:
            raise LegalityError(
                "indexer-stage-dense",
                f"{len(names)} layers {why}, first {names[0]}: they have no dense warm-up here",
                where="recipe.indexer.stage",
                next_action="use the sparse stage",
            )


def fused_layers(model: nn.Module) -> tuple[SparseAttention, ...]:
    """Sparse attentions of a model that our operator runs."""
    found = []
    for module in model.modules():
        switch = module.__dict__.get("forward")
        layer = getattr(getattr(switch, "fused_forward", None), "layer", None)
        if isinstance(layer, SparseAttention):
            found.append(layer)
    return tuple(found)
