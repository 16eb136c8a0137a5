"""The router as a torch operator: gradient, fake tensors, torch.compile.

Legend: T tokens, E experts, k chosen experts.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.router import contract
from shardwright.kernels.router.compute import Routing, Settings, admit, compute_backward, compute_forward

__all__ = ["Routing", "router"]


class Router(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, settings: Settings) -> tuple[Tensor, ...]:
        ctx.token = admit(logits, bias, settings)
        routing = compute_forward(logits, bias, settings, ctx.token)
        ctx.save_for_backward(logits, routing.experts)
        ctx.settings = settings
        ctx.mark_non_differentiable(routing.experts, routing.counts)
        ctx.set_materialize_grads(False)
        return tuple(routing)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dweights: Tensor | None, _: Tensor | None, __: Tensor | None, dmean: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        logits, experts = ctx.saved_tensors
        if dweights is None and dmean is None:
            return None, None, None
        if dweights is None:
            dweights = experts.new_zeros(experts.shape, dtype=torch.float32)
        return compute_backward(dweights, dmean, logits, experts, ctx.settings, ctx.token), None, None


@torch.library.custom_op("shardwright::router_forward", mutates_args=())
def router_forward(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    scoring: str,
    groups: int,
    groups_kept: int,
    group_score: str,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four parts of :class:`Routing` as one opaque node for tracers."""
    settings = Settings(k, scoring, groups, groups_kept, group_score, renormalise, scale)
    weights, experts, counts, mean = compute_forward(logits, bias, settings, admit(logits, bias, settings))
    return weights, experts, counts, mean


@router_forward.register_fake
def _(logits: Tensor, bias: Tensor | None, k: int, *settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (T, E), new = logits.shape, logits.new_empty
    return (
        new((T, k), dtype=torch.float32),
        new((T, k), dtype=torch.int64),
        new(E, dtype=torch.int32),
        new(E, dtype=torch.float32),
    )


@torch.library.custom_op("shardwright::router_backward", mutates_args=())
def router_backward(
    dweights: Tensor,
    dmean: Tensor,
    logits: Tensor,
    experts: Tensor,
    k: int,
    scoring: str,
    renormalise: bool,
    scale: float,
) -> Tensor:
    """``dlogits [T, E]``."""
    settings = Settings(k, scoring, 1, 1, "max", renormalise, scale)
    return compute_backward(dweights, dmean, logits, experts, settings)


@router_backward.register_fake
def _(dweights: Tensor, dmean: Tensor, logits: Tensor, *given: Any) -> Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.settings = Settings(*inputs[2:])
    ctx.mark_non_differentiable(output[1], output[2])


def _differentiate(ctx: Any, dweights: Tensor, _: Tensor, __: Tensor, dmean: Tensor) -> tuple[Tensor | None, ...]:
    logits, experts = ctx.saved_tensors
    s = ctx.settings
    dlogits = router_backward(dweights, dmean, logits, experts, s.k, s.scoring, s.renormalise, s.scale)
    return dlogits, *(None for _ in range(8))


router_forward.register_autograd(_differentiate, setup_context=_save)


def router(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    k: int,
    scoring: str = "softmax",
    groups: int = 1,
    groups_kept: int = 1,
    group_score: str = "top2",
    renormalise: bool = True,
    scale: float = 1.0,
) -> Routing:
    """Choose k experts for each token, in fp32 from the scores to the weights.

    Args:
        logits: ``[T, E]``, contiguous, fp32, bf16 or fp16; E <= 1024.
        bias: ``[E]``; it picks, the score without it weighs. It gets no gradient.
        k: experts of a token, at most 32.
        scoring: ``softmax`` over all experts, or ``sigmoid`` of each.
        groups: the experts form this many groups of neighbours (n_group) ...
        groups_kept: ... of which this many stand (topk_group) ...
        group_score: ... by their largest (``max``) or the sum of their two largest scores (``top2``).
        renormalise: divide the weights of a token by their sum (norm_topk_prob).
        scale: factor of all weights (routed_scaling_factor).

    Returns:
        Routing: weights and mean probability are differentiable in the logits.

    Raises:
        KernelError: an input outside ``contract``.
    """
    settings = Settings(k, scoring, groups, groups_kept, group_score, renormalise, scale)
    tensors = (logits,) if bias is None else (logits, bias)
    if not direct(*tensors):
        contract.check_static(logits, bias, **settings.contract())
        return Routing(*router_forward(logits, bias, *settings))
    if not wants_gradient(logits):
        return compute_forward(logits, bias, settings, admit(logits, bias, settings))
    return Routing(*cast("tuple[Tensor, ...]", Router.apply(logits, bias, settings)))
