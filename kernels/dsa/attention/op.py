"""Sparse attention as a torch operator: guards, gradient, fake tensors, torch.compile.

What a runtime installs is one function::

    o, lse = dsa_attention(q_nope, q_rope, latent, k_rope, indices, gate, scale=scale)

with ``q_nope [T, H, 512]`` the query times its head's part of the key up-projection (absorbed), ``q_rope [T, H, 64]``
rotated, ``latent [S, 512]`` the normed key-value latent, ``k_rope [S, 64]`` rotated, ``indices [T, K]`` int32 from the
indexer (-1 where fewer keys exist), ``gate`` optional, ``[T, H]`` or ``[T, H, 512]`` before its sigmoid. ``o [T, H,
512]`` then goes through each head's value up-projection; ``lse [T, H]`` is what the indexer's loss needs. Batches are
packed: T counts all tokens, indices are rows of the packed keys. The same meaning in plain torch, same arguments:
``reference.dsa_attention_reference``. ``sparse_gqa_attention`` is the same over key heads with values of their own.

Saved for the backward: the inputs, lse, and the ungated output in two parts of its dtype. With one part alone the
sum Σ o · dO, which is subtracted from dP, would carry the output's rounding: where one key has nearly all the share,
that is all that would be left of dS.

Precision: scores, shares and sums in fp32; shares and dS rounded once to the inputs' dtype for the matrix products;
gradients of keys summed in fp32 over all queries, then rounded once (in fixed order each query's part is rounded too).

Times of one H200, 64 heads, K 2048, T 8192 / 32768, bf16: forward 4.6 / 20.8 ms, with what a backward needs 4.8,
backward 16.1 / 84.8; in fixed order 31.3 at 8192 (1.94 times); a gate of each value adds 0.2 forward and 0.3
backward; the check of the selection 0.76. What bounds them: ``hopper``, ``hopper_backward``.

Legend: T queries, S keys, H query heads, G key heads, D, V widths of query and value, K entries, B keys of an entry.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import device
from shardwright.kernels.dispatch import direct, wants_gradient
from shardwright.kernels.dsa.attention import launches, selection
from shardwright.kernels.dsa.attention.problem import Problem


def compute_forward(p: Problem, save: bool, check_indices: bool) -> launches.Forward:
    """Guards that need real tensors, the check of the selection, and the forward."""
    p.check_places(interpreted=device.interpreted())
    if check_indices:
        selection.watch(p)
    with torch.no_grad():
        return launches.forward(p, save)


def compute_backward(
    p: Problem, dy: Tensor, lse: Tensor, o: Tensor, low: Tensor, deterministic: bool
) -> launches.Gradients:
    """An expanded gradient (``o.sum()``) is made real rows first."""
    selection.raise_pending()
    with torch.no_grad():
        return launches.backward(p, dy, lse, o, low, deterministic)


PARTS = ("qn", "qr", "kn", "kr", "v", "gate", "sinks")
"""Inputs that may learn, in the order in which the operator takes them."""


def _ordered(found: launches.Gradients) -> tuple[Tensor | None, ...]:
    return tuple(getattr(found, name) for name in PARTS)


class SparseAttention(torch.autograd.Function):
    """The short way for plain tensors (see ``kernels.dispatch``)."""

    @staticmethod
    def forward(
        ctx: Any,
        qn: Tensor,
        qr: Tensor | None,
        kn: Tensor,
        kr: Tensor | None,
        v: Tensor | None,
        gate: Tensor | None,
        sinks: Tensor | None,
        indices: Tensor,
        bounds: Tensor | None,
        scale: float,
        block: int,
        deterministic: bool,
        check_indices: bool,
    ) -> tuple[Tensor, Tensor]:
        p = Problem(qn, qr, kn, kr, v, indices, bounds, gate, sinks, scale, block)
        found = compute_forward(p, True, check_indices)
        ctx.save_for_backward(
            qn, qr, kn, kr, v, gate, sinks, indices, bounds, found.lse, found.low, found.y if gate is None else found.o
        )
        ctx.settings = (scale, block, deterministic)
        ctx.mark_non_differentiable(found.lse)
        ctx.set_materialize_grads(False)
        return found.y, found.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 13
        qn, qr, kn, kr, v, gate, sinks, indices, bounds, lse, low, o = ctx.saved_tensors
        scale, block, deterministic = ctx.settings
        p = Problem(qn, qr, kn, kr, v, indices, bounds, gate, sinks, scale, block)
        found = _ordered(compute_backward(p, dy, lse, o, low, deterministic))
        wanted = (part if yes else None for part, yes in zip(found, ctx.needs_input_grad[:7], strict=True))
        return (*wanted, *(None,) * 6)


@torch.library.custom_op("shardwright::dsa_attention_forward", mutates_args=())
def dsa_attention_forward(
    qn: Tensor,
    qr: Tensor | None,
    kn: Tensor,
    kr: Tensor | None,
    v: Tensor | None,
    gate: Tensor | None,
    sinks: Tensor | None,
    indices: Tensor,
    bounds: Tensor | None,
    scale: float,
    block: int,
    deterministic: bool,
    check_indices: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, lse, and the ungated output's parts as one opaque node; the first of these is empty where nothing gates."""
    p = Problem(qn, qr, kn, kr, v, indices, bounds, gate, sinks, scale, block)
    found = compute_forward(p, save, check_indices)
    return found.y, found.lse, (found.y.new_empty(0) if found.o is found.y else found.o), found.low


@dsa_attention_forward.register_fake
def _(
    qn: Tensor,
    qr: Tensor | None,
    kn: Tensor,
    kr: Tensor | None,
    v: Tensor | None,
    gate: Tensor | None,
    sinks: Tensor | None,
    indices: Tensor,
    bounds: Tensor | None,
    scale: float,
    block: int,
    deterministic: bool,
    check_indices: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    p = Problem(qn, qr, kn, kr, v, indices, bounds, gate, sinks, scale, block)
    p.check_static()
    shape = (qn.shape[0], qn.shape[1], p.DV)
    y = qn.new_empty(shape)
    lse = qn.new_empty(shape[:2], dtype=torch.float32)
    o = qn.new_empty(shape if save and gate is not None else (0,))
    return y, lse, o, qn.new_empty(shape if save else (0,))


@torch.library.custom_op("shardwright::dsa_attention_backward", mutates_args=())
def dsa_attention_backward(
    dy: Tensor,
    qn: Tensor,
    qr: Tensor | None,
    kn: Tensor,
    kr: Tensor | None,
    v: Tensor | None,
    gate: Tensor | None,
    sinks: Tensor | None,
    indices: Tensor,
    bounds: Tensor | None,
    lse: Tensor,
    o: Tensor,
    low: Tensor,
    scale: float,
    block: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients in the order of ``PARTS``; empty where an input is not there."""
    p = Problem(qn, qr, kn, kr, v, indices, bounds, gate, sinks, scale, block)
    found = _ordered(compute_backward(p, dy, lse, o, low, deterministic))
    whole = [dy.new_empty(0) if part is None else part.contiguous() for part in found]
    return cast(tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple(whole))


@dsa_attention_backward.register_fake
def _(
    dy: Tensor,
    qn: Tensor,
    qr: Tensor | None,
    kn: Tensor,
    kr: Tensor | None,
    v: Tensor | None,
    gate: Tensor | None,
    sinks: Tensor | None,
    indices: Tensor,
    bounds: Tensor | None,
    lse: Tensor,
    o: Tensor,
    low: Tensor,
    scale: float,
    block: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    parts = (qn, qr, kn, kr, v, gate, sinks)
    whole = [dy.new_empty(0) if part is None else part.new_empty(part.shape) for part in parts]
    return cast(tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple(whole))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, lse, o, low = output
    ctx.save_for_backward(*inputs[:9], lse, low, y if inputs[5] is None else o)
    ctx.settings = inputs[9:12]
    ctx.mark_non_differentiable(lse, o, low)


def _differentiate(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *parts, indices, bounds, lse, low, o = ctx.saved_tensors
    found = dsa_attention_backward(dy, *parts, indices, bounds, lse, o, low, *ctx.settings)
    wanted = (part if yes else None for part, yes in zip(found, ctx.needs_input_grad[:7], strict=True))
    return (*wanted, *(None,) * 7)


dsa_attention_forward.register_autograd(_differentiate, setup_context=_save)


def attend(p: Problem, deterministic: bool | None, check_indices: bool) -> tuple[Tensor, Tensor]:
    """Both front doors end here: static guards, then the short or the registered way."""
    p.check_static()
    fixed = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    parts = (p.qn, p.qr, p.kn, p.kr, p.v, p.gate, p.sinks)
    given = [part for part in parts if part is not None]
    rest = (p.indices, p.bounds, p.scale, p.block, fixed, check_indices)
    if not direct(*given, p.indices):
        y, lse, _, _ = dsa_attention_forward(*parts, *rest, wants_gradient(*given))
        return y, lse
    if not wants_gradient(*given):
        found = compute_forward(p, False, check_indices)
        return found.y, found.lse
    return cast(tuple[Tensor, Tensor], SparseAttention.apply(*parts, *rest))


def dsa_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    indices: Tensor,
    gate: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    block_size: int = 1,
    bounds: Tensor | None = None,
    deterministic: bool | None = None,
    check_indices: bool = True,
) -> tuple[Tensor, Tensor]:
    """Multi-head latent attention in its absorbed form over each query's selected keys.

    Args:
        q_nope: ``[T, H, V]``, V at most 512; bf16, fp16 or fp32 like all others. Queries and keys may be views whose
            last dim is dense and whose rows start on 16-byte boundaries.
        q_rope: ``[T, H, R]``.
        latent: ``[S, V]``, key and value.
        k_rope: ``[S, R]``.
        indices: ``[T, K]`` int32, each key (block) at most once in a row, -1 anywhere for nothing.
        gate: ``[T, H, V]`` or ``[T, H]``: the output is multiplied by its sigmoid. Must be dense.
        sinks: ``[H]`` logits of an entry without value; lse counts it.
        scale: of the scores, usually ``(128 + 64) ** -0.5``.
        block_size: keys of an entry; 1 for the indexer's top-k.
        bounds: ``[T, 2]`` int32: first key that a query may see and the one past its last (``visibility.bounds_of``).
            Needed where entries are blocks, which reach past a query's own position or document.
        deterministic: gradients of keys by ordered sums in place of fp32 atomics; torch's own switch where ``None``.
        check_indices: look for bad entries (``selection``); a caller whose indexer cannot make any may leave it out.

    Returns:
        o ``[T, H, V]``; lse ``[T, H]`` fp32 natural, without gradient. A query without a key: o = 0, lse = -inf or
        its sink.

    Raises:
        KernelError: an input outside ``contract``, or what ``selection`` finds.
    """
    p = Problem(
        q_nope,
        q_rope,
        _headed(latent),
        _headed(k_rope),
        None,
        _rowed(indices),
        bounds,
        gate,
        sinks,
        scale,
        block_size,
    )
    return attend(p, deterministic, check_indices)


def sparse_gqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    gate: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    block_size: int = 1,
    bounds: Tensor | None = None,
    deterministic: bool | None = None,
    check_indices: bool = True,
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention over selected keys, a selection for each key head.

    Args:
        q: ``[T, H, D]``; head h reads key head ``h // (H / G)``.
        k: ``[S, G, D]``.
        v: ``[S, G, V]``.
        indices: ``[T, G, K]`` int32.
        gate, sinks, scale, block_size, bounds, deterministic, check_indices: as for ``dsa_attention``.

    Returns:
        o ``[T, H, V]`` and lse ``[T, H]``.

    Raises:
        KernelError: as ``dsa_attention``.
    """
    p = Problem(q, None, k, None, v, indices, bounds, gate, sinks, scale, block_size)
    return attend(p, deterministic, check_indices)


def _headed(keys: Tensor) -> Tensor:
    """``[S, width]`` with its one key head; another rank is left for the guards."""
    return keys[:, None] if keys.dim() == 2 else keys.reshape(*keys.shape[:1], -1) if keys.dim() < 2 else keys


def _rowed(indices: Tensor) -> Tensor:
    return indices[:, None] if indices.dim() == 2 else indices
