"""Losses that even out the experts' loads: over a micro-batch (Switch) and over each sequence.

For a group of tokens: ``E · Σ_e f_e P_e`` with f_e the share of the group's choices that went to expert e and P_e the
mean of the router's normalised scores; 1 where both are even. Sources: Switch Transformers (eq. 4–6), DeepSeek-V3 (eq.
17–20). f has no gradient; P's reaches whatever trains before the router, or the router itself.

The loss is attached to the experts' input: its value joins nothing, its gradient joins the backward of that layer, so
it works under activation checkpointing and with fused experts. It is scaled by the micro-batch's share of the step's
sequences and divided by the number of MoE layers; gradients are summed over ranks, so accumulation and every mesh give
the gradient of one process.
Legend: T tokens, K experts per token, E experts, G groups, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.lora.inject import is_adapter
from shardwright.runtime.lora.linear import LoraLinear
from shardwright.schemas.errors import LegalityError, RecipeError
from shardwright.schemas.recipe import BalanceSpec

STRONGEST = 4.0
"""Most that a measured load multiplies a coefficient by."""
GATES = ("gate", "router")
"""Names of routers beside their experts."""


def balance_loss(scores: Tensor, top_k_index: Tensor, groups: int) -> Tensor:
    """Mean over G groups of consecutive tokens of ``E · Σ_e f_e P_e``.

    Args:
        scores: [T, E], each row summing to 1.
        top_k_index: [T, K].
        groups: G; divides T.
    """
    T, E = scores.shape
    chosen = torch.zeros_like(scores).scatter_add_(1, top_k_index, torch.ones_like(top_k_index, dtype=scores.dtype))
    f = chosen.view(groups, T // groups, E).sum(1) / (T // groups * top_k_index.shape[1])
    P = scores.view(groups, T // groups, E).mean(1)
    return E * (f * P).sum(1).mean()


def strength(rows: Tensor | None, target: float) -> float:
    """What the loads so far make of a layer's coefficient: 0 where even, 1 at the target, at most ``STRONGEST``.

    Args:
        rows: [E] rows of each expert up to the last step, over all ranks; ``None`` before the first.
        target: load of the hottest expert over the mean; 0 leaves the coefficient alone.
    """
    if target <= 1 or rows is None:
        return 1.0
    load = float(rows.max()) * rows.numel() / max(float(rows.sum()), 1.0)
    return min(STRONGEST, max(0.0, (load - 1) / (target - 1)))


class _Attach(torch.autograd.Function):
    """The first input as it is; in backward the second gets a gradient of one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.like


class Balancer:
    """The balancing losses of a model's MoE layers, in place from its making on.

    Args:
        model: live, or the plain reference.
        layers: names of its experts modules, which take (hidden, index, weights).
        spec: the recipe's.
        meter: loads so far.
        share: a micro-batch's sequences over those of the step.
        sequence_tokens: tokens of a sequence.

    Raises:
        LegalityError: ``balance-router`` where no router [E, H] stands beside the experts.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[str],
        spec: BalanceSpec,
        meter: LoadMeter,
        *,
        share: float,
        sequence_tokens: int,
    ) -> None:
        self.meter, self.share, self.sequence_tokens = meter, share, sequence_tokens
        self.auxiliary, self.sequence = float(spec.auxiliary), float(spec.sequence)
        self.target = float(spec.target_load)
        self.inputs: dict[str, Tensor] = {}
        self.total: Tensor | None = None
        self.layers = tuple(layers)
        for name in self.layers:
            gate = router_of(model, name)
            gate.register_forward_pre_hook(self._keep(name))
            model.get_submodule(name).register_forward_pre_hook(self._attach(name, gate))

    def take(self) -> Tensor | None:
        """The losses since the last call, as they are scaled, on this rank; ``None`` where nothing ran."""
        total, self.total = self.total, None
        return total

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.inputs[name] = args[0].reshape(-1, args[0].shape[-1])

        return hook

    def _attach(self, name: str, gate: Any) -> Any:
        sigmoid = hasattr(gate, "e_score_correction_bias")

        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            x = self.inputs.pop(name)
            trained = any(value.requires_grad for value in (x, gate.weight, *(adapter_of(gate) or ())[:2]))
            if not torch.is_grad_enabled() or not trained:
                return None
            hidden, index, *rest = args
            logits = router_logits(gate, x)
            scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
            if sigmoid:
                scores = scores / scores.sum(-1, keepdim=True)
            loss = logits.new_zeros(())
            if self.auxiliary:
                loss = loss + self.auxiliary * balance_loss(scores, index, 1)
            if self.sequence:
                loss = loss + self.sequence * balance_loss(scores, index, len(x) // self.sequence_tokens)
            loss = loss * (strength(self.meter.total.get(name), self.target) * self.share / len(self.layers))
            if self.meter.recording:
                self.total = loss.detach() if self.total is None else self.total + loss.detach()
            return (_Attach.apply(hidden, loss), index, *rest)

        return hook


def adapter_of(gate: Any) -> tuple[Tensor, Tensor, float] | None:
    """A [r, H], B [E, r] and the scaling of an adapted router, live or plain; ``None`` of a frozen one."""
    if not isinstance(getattr(gate, "lora_a", None), Tensor):
        return None
    return gate.lora_a, gate.lora_b, gate.scaling if isinstance(gate, LoraLinear) else gate.lora_scaling


def router_logits(gate: Any, x: Tensor) -> Tensor:
    """[T, H] → [T, E] fp32: what the router makes its scores of, with its bias and its adapter."""
    bias = getattr(gate, "bias", None)
    logits = F.linear(x.float(), gate.weight.float(), bias.float() if isinstance(bias, Tensor) else None)
    if (adapter := adapter_of(gate)) is not None:
        a, b, scaling = adapter
        logits = logits + scaling * F.linear(F.linear(x.float(), a.float()), b.float())
    return logits


def router_of(model: nn.Module, experts: str) -> nn.Module:
    """The router that stands beside an experts module.

    Raises:
        LegalityError: ``balance-router``.
    """
    block = model.get_submodule(experts.rpartition(".")[0])
    for name in GATES:
        gate = getattr(block, name, None)
        weight = getattr(gate, "weight", None)
        if isinstance(gate, nn.Module) and isinstance(weight, Tensor) and weight.dim() == 2:
            return gate
    raise LegalityError(
        "balance-router",
        f"{type(block).__name__} has no router named {' or '.join(GATES)} with a weight [E, H]",
        where=experts,
        next_action="set recipe.balance.auxiliary and recipe.balance.sequence to 0 for this family",
    )


def require_something_upstream(model: nn.Module, layers: tuple[str, ...]) -> None:
    """A balancing loss needs a trainable value before some router, or in it.

    Raises:
        RecipeError: ``balance-frozen-router``.
    """
    gates = [router_of(model, name) for name in layers]
    order = {id(module): place for place, module in enumerate(model.modules())}
    trained = [
        order[id(module)]
        for module in model.modules()
        if any(is_adapter(name) for name, _ in module.named_parameters(recurse=False))
    ]
    if not gates or not trained or min(trained) > max(order[id(gate)] for gate in gates):
        raise RecipeError(
            "balance-frozen-router",
            f"{len(gates)} routers are frozen and no adapter stands before any of them: the loss would change nothing",
            where="recipe.balance",
            next_action="adapt attention or an earlier layer, or set both coefficients to 0",
        )
