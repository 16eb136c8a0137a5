"""The indexer's loss as a torch operator: guards, gradient, fake tensors, torch.compile.

Products are of 16-bit values; sums, scores and target are fp32. The forward computes the gradients too, chunk by
chunk; the backward multiplies them by the loss's own. Saved for it: dq ``[T, N, D]``, and fp32 dk ``[S, D]`` and dw
``[T, N]``. A mean's 1/T is split as m · 2⁻ᵉ, m in the gradient of the scores and 2⁻ᵉ at the end, so that dq is rounded
no second time while the incoming gradient is a power of two.

Legend: T queries, S keys, N indexer heads, D indexer width, H attention heads, G key heads, M attention width,
k chosen keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device, guards
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.dsa.indexer import alarms, launches
from shardwright.kernels.dsa.indexer.contract import check
from shardwright.kernels.dsa.indexer.gradient_launches import Gradients
from shardwright.kernels.dsa.indexer.op import default_scale
from shardwright.kernels.dsa.indexer.rotation import rotated
from shardwright.kernels.dsa.kl import contract, walk
from shardwright.kernels.guards import TensorLike

NAME = contract.NAME


class Settings(NamedTuple):
    """Numbers and flags of one loss."""

    scale: float
    attention_scale: float
    query_start: int
    mean: bool
    deterministic: bool


def factors(T: int, mean: bool) -> tuple[float, float]:
    """``(m, 2⁻ᵉ)`` with ``m · 2⁻ᵉ`` = 1/T for a mean, m in (1/2, 1]; (1, 1) for a sum."""
    if not mean:
        return 1.0, 1.0
    exponent = max(1, T).bit_length() - 1
    return 2.0**exponent / max(1, T), 2.0**-exponent


def compute_forward(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    q_main: Tensor,
    k_main: Tensor,
    lse: Tensor,
    indices: Tensor | None,
    cu_seqlens: Tensor | None,
    settings: Settings,
    gradient: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Guards and the walk → the loss; dq, dk, dw before 2⁻ᵉ and the loss's gradient, where asked for."""
    tensors: dict[str, TensorLike] = {"q": q, "k": k, "weights": weights}
    tensors |= {"q_main": q_main, "k_main": k_main, "lse": lse}
    if indices is not None:
        tensors["indices"] = indices
    check(tensors, interpreted=device.interpreted(), name=NAME)
    T, counts = q.shape[0], alarms.fresh(q)
    m, _ = factors(T, settings.mean)
    with torch.no_grad():
        into = Gradients.of(q, k, fixed_order=settings.deterministic or indices is None) if gradient else None
        losses = torch.empty(T, dtype=torch.float32, device=q.device)
        where = launches.place(T, k.shape[0], settings.query_start, cu_seqlens, counts)
        if T > 0:
            learner = walk.Learner(q, k, weights, settings.scale)
            teacher = walk.Teacher(q_main, k_main, lse, settings.attention_scale)
            with device.current(q):
                if indices is None:
                    walk.dense(learner, teacher, where, counts, losses, into, m)
                else:
                    walk.sparse(learner, teacher, indices, where, counts, losses, into, m)
        loss = losses.sum() / T if settings.mean and T else losses.sum()
    alarms.watch(counts, NAME)
    return loss, None if into is None else (into.dq, into.keys(), into.dw)


def compute_backward(g: Tensor, parts: tuple[Tensor, ...], dtypes: tuple[torch.dtype, ...], T: int, mean: bool) -> Any:
    """The saved gradients times the loss's own."""
    _, power = factors(T, mean)
    scale = g.to(torch.float32).reshape(1).contiguous()
    return tuple(walk.scaled(part, scale, power, dtype) for part, dtype in zip(parts, dtypes, strict=True))


class DsaKl(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        q_main: Tensor,
        k_main: Tensor,
        lse: Tensor,
        indices: Tensor | None,
        cu_seqlens: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        teacher = (q_main, k_main, lse)
        loss, parts = compute_forward(q, k, weights, *teacher, indices, cu_seqlens, settings, True)
        assert parts is not None
        ctx.save_for_backward(*parts)
        ctx.dtypes, ctx.settings = (q.dtype, k.dtype, weights.dtype), settings
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.saved_tensors
        found = compute_backward(g, parts, ctx.dtypes, parts[0].shape[0], ctx.settings.mean)
        return *found, *(None for _ in range(6))


@torch.library.custom_op("shardwright::dsa_kl_forward", mutates_args=())
def dsa_kl_forward(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    q_main: Tensor,
    k_main: Tensor,
    lse: Tensor,
    indices: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    attention_scale: float,
    query_start: int,
    mean: bool,
    deterministic: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, dq, dk, dw as one opaque node for tracers; gradients not asked for are empty."""
    settings = Settings(scale, attention_scale, query_start, mean, deterministic)
    loss, parts = compute_forward(q, k, weights, q_main, k_main, lse, indices, cu_seqlens, settings, gradient)
    dq, dk, dw = (q.new_empty(0), q.new_empty(0), q.new_empty(0)) if parts is None else parts
    return loss, dq, dk, dw


@dsa_kl_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    q_main: Tensor,
    k_main: Tensor,
    lse: Tensor,
    indices: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    attention_scale: float,
    query_start: int,
    mean: bool,
    deterministic: bool,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.float32
    loss = q.new_empty((), dtype=wide)
    if not gradient:
        return loss, q.new_empty(0), q.new_empty(0), q.new_empty(0)
    return loss, torch.empty_like(q), q.new_empty(k.shape, dtype=wide), q.new_empty(weights.shape, dtype=wide)


@torch.library.custom_op("shardwright::dsa_kl_backward", mutates_args=())
def dsa_kl_backward(g: Tensor, part: Tensor, power: float, dtype: torch.dtype) -> Tensor:
    """One saved gradient times the loss's own."""
    return walk.scaled(part, g.to(torch.float32).reshape(1).contiguous(), power, dtype)


@dsa_kl_backward.register_fake
def _(g: Tensor, part: Tensor, power: float, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(part, dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes, ctx.power = tuple(t.dtype for t in inputs[:3]), factors(inputs[0].shape[0], inputs[11])[1]


def _differentiate(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    parts = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return *(dsa_kl_backward(g, part, ctx.power, dtype) for part, dtype in parts), *(None for _ in range(11))


dsa_kl_forward.register_autograd(_differentiate, setup_context=_save)


def dsa_kl(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    q_main: Tensor,
    k_main: Tensor,
    lse: Tensor,
    indices: Tensor | None = None,
    *,
    attention_scale: float,
    scale: float | None = None,
    query_start: int = 0,
    cu_seqlens: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    layout: str = "half-split",
    reduction: str = "mean",
    deterministic: bool = False,
) -> Tensor:
    """``KL(p ‖ softmax(I))`` over queries: p the attention's probabilities summed over heads and normalised.

    With ``indices`` over the chosen keys (the sparse stage), without over all keys that a query sees (the dense
    warm-up). The gradient of a score is ``softmax(I) - p``; the target has none. Memory: ``[T, k]`` of indices that
    live anyway, 256 MiB of workspace at most, and what the gradients themselves need.

    Args:
        q, k, weights: the indexer's, as in ``dsa_indexer``; pass them made from detached hidden states where the
            base must not learn from this loss.
        q_main: ``[T, H, M]`` of q's dtype, rotated; absorbed latent form (G = 1, M = 512 + 64) or any other.
        k_main: ``[S, G, M]``, G divides H.
        lse: ``[T, H]`` fp32, natural log, of the same attention: over the chosen keys, or over all; with a sink
            in it, heads count by the mass that they leave to keys.
        indices: ``[T, k]`` int32, distinct keys, -1 anywhere for nothing; a layer that shares its selection
            passes that of the layer before. A key that stands twice counts twice, in target and scores alike: it is
            the attention over this selection that refuses it.
        attention_scale: the attention's softmax scale.
        scale: of the indexer's scores; ``(N · D)^-0.5`` where ``None``.
        cu_seqlens: for the dense warm-up over packed sequences.
        reduction: ``mean`` over the queries, or ``sum``.
        deterministic: in the sparse stage, dk in a fixed order in place of fp32 atomics; the dense one always is.

    Returns:
        fp32 scalar; 0 for no query. A query without keys counts with loss 0.

    Raises:
        KernelError: an input outside the contract; ``nan-scores``, ``index-out-of-range`` (see ``alarms``).
    """
    contract.check_static(
        q,
        k,
        weights,
        q_main,
        k_main,
        lse,
        indices,
        attention_scale=attention_scale,
        query_start=query_start,
        reduction=reduction,
        main_learns=wants_gradient(q_main, k_main, lse),
    )
    scale = default_scale(q) if scale is None else scale
    if not (math.isfinite(scale) and scale > 0):
        raise guards.refuse(NAME, "bad-scale", f"scale is {scale!r}", "pass a positive number")
    q, k = rotated(q, k, cos, sin, layout, query_start, NAME)
    tensors = (q, k, weights, q_main, k_main, lse)
    settings = Settings(scale, attention_scale, query_start, reduction == "mean", deterministic)
    learns = wants_gradient(q, k, weights)
    if not direct(*tensors):
        return dsa_kl_forward(*tensors, indices, cu_seqlens, *settings, learns)[0]
    if not learns:
        return compute_forward(*tensors, indices, cu_seqlens, settings, False)[0]
    return cast(Tensor, DsaKl.apply(*tensors, indices, cu_seqlens, settings))
