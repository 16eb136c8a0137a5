"""Biases that pick experts, moved once a step by the loads of all ranks: no loss, no gradient.

``sign``: ``b ← b + u · sign(mean load − load)`` (arXiv 2408.15664, eq. 3).
``quantile``: token i takes expert e where ``s_ie + b_e`` reaches the worst adjusted score that it took, t_i; so with
every t_i held, expert e gets its even share n = T · K / E at ``b_e = −v``, where n of the margins ``s_ie − t_i`` are v
or more. The mean over experts is kept: adding one number to all biases changes no choice. Margins are counted in bins
of 1 / 512 and summed as integers over micro-batches and ranks, so every mesh moves the same bias to the same bits.
Legend: T tokens, K experts per token, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.checkpoints.router_bias import no_bias, router_bias
from shardwright.runtime.experts.auxiliary import router_of
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.recipe import BalanceSpec

BINS = 1024
"""Of the histogram of margins over −1 … 1; what lies outside counts in the outermost."""
OTHER_CHOICES = 0.01
"""Share of tokens that may have chosen otherwise than by score and bias (ties) where a quantile is taken."""


def against_load(bias: Tensor, rows: Tensor, rate: float) -> Tensor:
    """[E] bias, moved by ``rate`` towards experts with fewer rows [E] than the mean."""
    load = rows.to(bias.device).double()
    return bias + rate * (load.mean() - load).sign().to(bias.dtype)


def margins(scores: Tensor, bias: Tensor, top_k_index: Tensor) -> Tensor:
    """[T, E] scores, [E] bias, [T, K] choices → [E, BINS] int32 tokens by ``score − worst adjusted score taken``."""
    adjusted = scores + bias
    bound = adjusted.gather(1, top_k_index).amin(1, keepdim=True)
    place = ((scores - bound + 1) * (BINS / 2)).floor().clamp_(0, BINS - 1).long()
    counts = torch.zeros(scores.shape[1], BINS, dtype=torch.int32, device=scores.device)
    return counts.scatter_add_(1, place.t(), torch.ones_like(place.t(), dtype=torch.int32))


def even_bias(bias: Tensor, counts: Tensor, share: float) -> Tensor:
    """The bias at which each expert would have got ``share`` of the tokens.

    Args:
        bias: [E].
        counts: [E, BINS] of :func:`margins`.
        share: K / E.
    """
    seen = counts.double()
    above = seen.flip(1).cumsum(1).flip(1)  # tokens whose margin reaches the bin's lower edge
    wanted = share * seen.sum(1, keepdim=True)
    place = (above >= wanted).sum(1, keepdim=True).sub(1).clamp_(0)
    inside = seen.gather(1, place).clamp_min(1.0)
    part = ((above.gather(1, place) - wanted) / inside).clamp(0, 1)
    edge = ((place + part) * (2 / BINS) - 1).squeeze(1)
    return (-edge - (-edge).mean() + bias.double().mean()).to(bias.dtype)


class RouterBiases:
    """The biases of a model's MoE layers and how they move; the same values on every rank.

    Args:
        model: live, its buffers loaded.
        layers: experts module → E over all ranks.
        spec: the recipe's; not ``frozen``.
        meter: says whether a forward counts.

    Raises:
        RecipeError: ``balance-bias`` where a layer has no bias.
        LegalityError: ``balance-router`` where ``quantile`` finds no router [E, H].
    """

    def __init__(self, model: nn.Module, layers: dict[str, int], spec: BalanceSpec, meter: LoadMeter) -> None:
        self.rule, self.rate, self.meter, self.model = spec.bias, float(spec.bias_rate), meter, model
        self.names = {layer: router_bias(model, layer, size) for layer, size in layers.items()}
        without = [layer for layer, name in self.names.items() if name is None]
        if without or not layers:
            raise no_bias(spec.bias, without, type(model).__name__)
        self.inputs: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        for layer, name in self.names.items():
            self._widen(str(name))
            if self.rule == "quantile":
                gate = router_of(model, layer)
                gate.register_forward_pre_hook(self._keep(layer))
                model.get_submodule(layer).register_forward_pre_hook(self._count(layer, gate))
        self.choices = self._none()

    def tensors(self) -> dict[str, Tensor]:
        """Full name → bias [E] fp32, as the model holds it now."""
        return {str(name): self.model.get_buffer(str(name)) for name in self.names.values()}

    @torch.no_grad()
    def move(self, loads: dict[str, Tensor]) -> None:
        """One update, after a step.

        Args:
            loads: layer → rows of each expert in the step, over all ranks.

        Raises:
            RecipeError: ``balance-choice`` where ``quantile`` meets a router that chooses by other rules.
        """
        if self.rule == "quantile":
            self._require_own_choices()
        for layer, name in self.names.items():
            rows, bias = loads.get(layer), self.model.get_buffer(str(name))
            if rows is None or not bool(rows.any()):
                continue
            flat = bias.reshape(-1)
            if self.rule == "sign":
                moved = against_load(flat, rows, self.rate)
            else:
                counts = self.counts[layer]
                if dist.is_initialized() and dist.get_world_size() > 1:
                    dist.all_reduce(counts)
                top_k = float(rows.sum()) / max(float(counts[0].sum()), 1.0)
                moved = even_bias(flat, counts, top_k / rows.numel())
            bias.copy_(moved.view_as(bias))
        self.counts = {}

    def _widen(self, name: str) -> None:
        """fp32, whatever the model is built in: steps of 0.001 vanish in bf16."""
        owner, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(owner)
        module._buffers[leaf] = self.model.get_buffer(name).float()

    def _keep(self, layer: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self.meter.recording:
                self.inputs[layer] = args[0].detach().reshape(-1, args[0].shape[-1])

        return hook

    def _count(self, layer: str, gate: Any) -> Any:
        @torch.no_grad()
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not self.meter.recording:
                return
            index, bias = args[1], self.model.get_buffer(str(self.names[layer])).reshape(-1)
            scores = F.linear(self.inputs.pop(layer).float(), gate.weight.float()).sigmoid()
            own = (scores + bias).topk(index.shape[1]).indices.sort(-1).values
            other = (own != index.sort(-1).values).any(-1).sum()
            self.choices += torch.stack((other, torch.full_like(other, len(index))))
            counts = margins(scores, bias, index)
            seen = self.counts.get(layer)
            self.counts[layer] = counts if seen is None else seen.add_(counts)

        return hook

    def _none(self) -> Tensor:
        """No choice seen yet: (others, all) on the model's device."""
        return torch.zeros(2, dtype=torch.int64, device=next(iter(self.tensors().values())).device)

    def _require_own_choices(self) -> None:
        """Every rank comes here with every step, so that all refuse together."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.choices)
        (other, seen), self.choices = self.choices.tolist(), self._none()
        if other > OTHER_CHOICES * seen:
            raise RecipeError(
                "balance-choice",
                f"{other} of {seen} choices are not the best of sigmoid score + bias: this family chooses by other "
                "rules (groups of experts, another score)",
                where="recipe.balance.bias",
                next_action="choose sign: it reads loads alone",
            )
