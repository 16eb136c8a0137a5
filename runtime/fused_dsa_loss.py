"""The indexers' own loss: how far their softmaxed scores are from the attention over the keys that they selected.

``KL(p ‖ softmax(I))`` per token, p the attention's probabilities summed over heads and normalised. Hidden states and
queries that the indexer reads, and the attention that it learns from, are detached. The value joins nothing; its
gradient joins the backward of its layer, so it works under activation checkpointing. It is the mean over a
micro-batch's tokens times that batch's share of the step, summed over layers with an indexer of their own.
Source: DeepSeek-V3.2, sparse training stage.
Legend: B rows, S tokens a row, T = B · S, H heads, J indexer heads, D indexer width, K selected keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.fused_dsa_borders import Borders
from shardwright.runtime.fused_dsa_layer import LEARNER, NOT_ROTATED, SparseAttention, half_table
from shardwright.runtime.fused_dsa_pooled import PooledSparseAttention
from shardwright.runtime.lora.inject import is_adapter
from shardwright.schemas.errors import LegalityError, RecipeError
from shardwright.schemas.plan import AdaptationPlan


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
    """The loss of a run's sparse attentions; layers find it on their module."""

    coefficient: float
    share: float
    """A micro-batch's sequences over those of the step."""
    meter: LoadMeter
    layers: tuple[SparseAttention, ...]
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
        """Make the layers attach their losses."""
        for layer in self.layers:
            layer.module.__dict__[LEARNER] = self

    def put_on_plain(self, model: nn.Module) -> None:
        """The same loss on the plain model of the first step's check, in plain torch."""
        silent = replace(self, meter=LoadMeter())
        for layer in self.layers:
            plain = replace(layer, module=model.get_submodule(layer.name))
            plain.module.register_forward_hook(_plain_hook(plain, silent), with_kwargs=True)


def indexer_loss_for(plan: AdaptationPlan, model: nn.Module, meter: LoadMeter) -> IndexerLoss | None:
    """The loss on the live model; ``None`` where the recipe has none.

    Raises:
        LegalityError: ``indexer-loss-unfused`` where an indexer is not run by the operator, ``indexer-loss-pooled``
            where one scores pools of keys.
        RecipeError: ``indexer-loss-frozen`` where no adapter lies on any indexer.
    """
    recipe = plan.decision.recipe
    if not float(recipe.indexer.loss):
        return None
    layers = tuple(layer for layer in fused_layers(model) if not layer.shared)
    if pooled := [layer.name for layer in layers if isinstance(layer, PooledSparseAttention)]:
        raise LegalityError(
            "indexer-loss-pooled",
            f"the loss is one over keys; {len(pooled)} indexers score pools of keys, first {pooled[0]}",
            where="recipe.indexer.loss",
            next_action="set the coefficient to 0: these indexers stay frozen",
        )
    indexers = {name.rpartition(".")[0] for name, _ in model.named_modules() if name.endswith(".indexer")}
    if left := sorted(indexers - {layer.name for layer in layers}):
        raise LegalityError(
            "indexer-loss-unfused",
            f"{len(left)} of {len(indexers)} indexers run as the family wrote them, first {left[0]}: without gradients",
            where="recipe.indexer.loss",
            next_action="accept the dsa proposals for all layers, or set the coefficient to 0",
        )
    adapters = [name for name, _ in model.named_parameters() if is_adapter(name) and ".indexer." in name]
    if not layers or not adapters:
        raise RecipeError(
            "indexer-loss-frozen",
            f"{len(layers)} layers have an indexer, and {len(adapters)} adapters lie on one: nothing would learn",
            where="recipe.indexer.loss",
            next_action="add the target *.indexer.wq_b (or wk, weights_proj), or set the coefficient to 0",
        )
    share = plan.decision.strategy.micro_batch_sequences / recipe.batch.global_batch_sequences
    made = IndexerLoss(float(recipe.indexer.loss), share, meter, layers)
    made.put_on()
    return made


def fused_layers(model: nn.Module) -> tuple[SparseAttention, ...]:
    """Sparse attentions of a model that our operator runs."""
    found = []
    for module in model.modules():
        switch = module.__dict__.get("forward")
        layer = getattr(getattr(switch, "fused_forward", None), "layer", None)
        if isinstance(layer, SparseAttention):
            found.append(layer)
    return tuple(found)


def _plain_hook(layer: SparseAttention, loss: IndexerLoss) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        if not torch.is_grad_enabled():
            return output
        borders = Borders.of(x, kwargs.get("position_ids"))
        return (loss.attach(output[0], plain_loss(layer, x, kwargs.get("position_embeddings"), borders)), *output[1:])

    return hook


def plain_loss(layer: SparseAttention, x: Tensor, tables: tuple[Tensor, Tensor] | None, borders: Borders) -> Tensor:
    """The loss of one layer in plain torch, keys and values as the module itself projects them."""
    from shardwright.kernels.dsa.indexer.reference import indexer_reference, rotate_reference
    from shardwright.kernels.dsa.kl.reference import attention_lse, dsa_kl_reference

    def turned(part: Tensor, layout: str) -> Tensor:
        if tables is None or layout == NOT_ROTATED:
            return part
        cos, sin = (half_table(table, borders) for table in tables)
        return rotate_reference(part, cos, sin, layout)

    x = x.detach()
    with torch.no_grad():
        made = layer.projected(x, borders)
        heads = made.q_nope.shape[1]
        expand = layer.module.get_submodule(layer.roles["kv_b_weight"].rpartition(".")[0])
        keys = expand(made.latent).unflatten(-1, (heads, -1))[..., : layer.nope]
        rotated = turned(made.k_rope, layer.layout)[:, None].expand(-1, heads, -1)
        q_main = torch.cat((made.q_nope, turned(made.q_rope, layer.layout)), -1)
        k_main = torch.cat((keys, rotated), -1)
    q, k, weights = layer.index_values(x, made.q_latent)
    q, k = turned(q, layer.index_layout), turned(k, layer.index_layout)
    settings: dict[str, Any] = {"scale": layer.index_scale, "cu_seqlens": borders.cu_seqlens()}
    with torch.no_grad():
        indices = indexer_reference(q, k, weights, top_k=min(layer.top_k, borders.S), **settings)
        lse = attention_lse(q_main, k_main, indices, layer.scale)
        if "sinks" in layer.roles:
            lse = torch.logaddexp(lse, layer.part("sinks").float())
    return dsa_kl_reference(q, k, weights, q_main, k_main, lse, indices, attention_scale=layer.scale, **settings)
