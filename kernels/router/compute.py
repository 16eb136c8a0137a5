"""Forward and backward of the router out of its launches: guards first, no autograd.

Legend: T tokens, E experts, k chosen experts, G groups, P programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.admitted import Admitted
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.router import configs, contract
from shardwright.kernels.router.triton import router_bwd_kernel, router_fwd_kernel, router_mean_kernel


class Routing(NamedTuple):
    """Where each token goes, and how the load falls."""

    weights: Tensor
    """``[T, k]`` fp32."""
    experts: Tensor
    """``[T, k]`` int64, best first, the lower index first among equals; no gradient."""
    counts: Tensor
    """``[E]`` int32, tokens of each expert; no gradient."""
    mean_probability: Tensor
    """``[E]`` fp32, mean over tokens; 0 where T is 0."""


class Settings(NamedTuple):
    """What the model's configuration says about its router."""

    k: int
    scoring: str
    groups: int
    groups_kept: int
    group_score: str
    renormalise: bool
    scale: float

    def contract(self) -> dict[str, Any]:
        """What ``contract.check_static`` looks at."""
        return {name: value for name, value in self._asdict().items() if name != "renormalise"}


ADMITTED = Admitted()


def admit(logits: Tensor, bias: Tensor | None, settings: Settings) -> object | None:
    """All guards; the layout's token."""

    def guards() -> None:
        contract.check_static(logits, bias, **settings.contract())
        contract.check(logits, bias, interpreted=device.interpreted())

    return ADMITTED.check((logits, bias), settings, guards)


def compute_forward(logits: Tensor, bias: Tensor | None, settings: Settings, token: object | None = None) -> Routing:
    """One pass over admitted logits and one small reduction; no host wait."""
    T, E = logits.shape
    new = logits.new_empty
    weights, experts = new((T, settings.k), dtype=torch.float32), new((T, settings.k), dtype=torch.int64)
    counts = torch.zeros(E, dtype=torch.int32, device=logits.device)
    if T == 0:
        return Routing(weights, experts, counts, logits.new_zeros(E, dtype=torch.float32))
    mean = new(E, dtype=torch.float32)
    at = configs.forward(T, E, settings.k)
    P = at.programs(T, device.multiprocessors(logits))
    partial = new((P, E), dtype=torch.float32)
    tensors, key = (logits, bias, weights, experts, counts, partial), key_of(token, "fwd")
    if not again(key, tensors):
        group_tile, member_tile = configs.tile(E, settings.groups)
        with device.current(logits):
            start(
                key,
                tensors,
                router_fwd_kernel,
                (P,),
                logits,
                logits if bias is None else bias,
                weights,
                experts,
                counts,
                partial,
                settings.scale,
                T,
                E=E,
                K=settings.k,
                SLOTS=configs.slots(settings.k),
                G=settings.groups,
                M=E // settings.groups,
                GROUPS=group_tile,
                MEMBERS=member_tile,
                KEPT=settings.groups_kept,
                TOP2=settings.group_score == "top2",
                SOFTMAX=settings.scoring == "softmax",
                BIASED=bias is not None,
                RENORMALISE=settings.renormalise,
                num_warps=at.warps,
            )
    key = key_of(token, "mean")
    if not again(key, (partial, mean)):
        with device.current(logits):
            start(
                key,
                (partial, mean),
                router_mean_kernel,
                (-(-E // configs.MEAN_BLOCK_E),),
                partial,
                mean,
                P,
                T,
                E,
                BLOCK_P=configs.MEAN_BLOCK_P,
                BLOCK_E=configs.MEAN_BLOCK_E,
                num_warps=configs.MEAN_WARPS,
            )
    return Routing(weights, experts, counts, mean)


def compute_backward(
    dweights: Tensor,
    dmean: Tensor | None,
    logits: Tensor,
    experts: Tensor,
    settings: Settings,
    token: object | None = None,
) -> Tensor:
    """``dlogits [T, E]`` in the logits' dtype; an expanded gradient is made real rows first."""
    T, E = logits.shape
    dlogits = torch.empty_like(logits)
    if T == 0:
        return dlogits
    at = configs.backward(T, E, settings.k)
    P = at.programs(T, device.multiprocessors(logits))
    dweights, dmean = dweights.contiguous(), None if dmean is None else dmean.contiguous()
    tensors, key = (logits, experts, dweights, dmean, dlogits), key_of(token, "bwd", dmean is None)
    if again(key, tensors):
        return dlogits
    with device.current(logits):
        start(
            key,
            tensors,
            router_bwd_kernel,
            (P,),
            logits,
            experts,
            dweights,
            dweights if dmean is None else dmean,
            dlogits,
            settings.scale,
            T,
            E=E,
            K=settings.k,
            SLOTS=configs.slots(settings.k),
            COLUMNS=configs.tile(E, 1)[1],
            SOFTMAX=settings.scoring == "softmax",
            RENORMALISE=settings.renormalise,
            MEAN_GRADIENT=dmean is not None,
            num_warps=at.warps,
        )
    return dlogits
