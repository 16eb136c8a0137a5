"""Head and cross-entropy, chunk after chunk of tokens: products in the vendor's library, the rest fused.

For each chunk: logits = x · Wᵀ (+ LoRA), one pass for loss and gradient in place, then all gradients that
need this chunk's logits. Since the head is frozen and the loss a sum over tokens, the gradients are
final up to one factor that only the backward knows. Gradients of LoRA add up over chunks in fp32.

Legend: T tokens, H hidden, V vocabulary, r LoRA rank, C rows of a chunk, m · 2⁻ᵉ = 1 / counting rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.linear_cross_entropy import configs
from shardwright.kernels.linear_cross_entropy.triton import (
    count_targets_kernel,
    cross_entropy_kernel,
    scale_rows_kernel,
)


@dataclass(frozen=True)
class Lora:
    """LoRA on the head: ``scale · (x · aᵀ) · bᵀ`` with ``a [r, H]`` and ``b [V, r]`` in x's dtype."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class Found:
    """What one walk over the chunks gives. Gradients lack the factor 2⁻ᵉ and the loss's own gradient."""

    rows: Tensor
    """Loss of each row, ``[T]``, fp32, 0 where ignored."""
    counts: Tensor
    """(rows that count, labels out of range, first such row, its label), int64."""
    factors: Tensor
    """(m, 2⁻ᵉ), fp32."""
    dx: Tensor | None
    da: Tensor | None
    db: Tensor | None


def count_targets(
    targets: Tensor, tokens: Tensor | None, V: int, ignore_index: int, mean: bool
) -> tuple[Tensor, Tensor]:
    """``counts`` and ``factors`` of :class:`Found`, without the host waiting."""
    counts = torch.empty(4, dtype=torch.int64, device=targets.device)
    factors = torch.empty(2, dtype=torch.float32, device=targets.device)
    with device.current(targets):
        count_targets_kernel[(1,)](
            targets,
            counts if tokens is None else tokens,
            counts,
            factors,
            targets.numel(),
            V,
            ignore_index,
            MEAN=mean,
            GIVEN=tokens is not None,
            BLOCK=configs.COUNT_BLOCK,
            num_warps=configs.COUNT_WARPS,
        )
    return counts, factors


def loss_pass(
    logits: Tensor, targets: Tensor, factors: Tensor, rows: Tensor, V: int, ignore_index: int, gradient: bool
) -> None:
    """Fill ``rows [C]``; with ``gradient`` overwrite ``logits [C, stride]`` with m · (softmax - onehot)."""
    at = configs.loss(V)
    with device.current(logits):
        cross_entropy_kernel[(logits.shape[0],)](
            logits,
            targets,
            factors,
            rows,
            V,
            logits.shape[1],
            ignore_index,
            GRADIENT=gradient,
            PADDED=logits.shape[1] != V,
            GROUPS=at.groups,
            WIDTH=configs.WIDTH,
            num_warps=at.warps,
        )


def over_vocabulary(gradient: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """``out [C, N] = gradient [C, V] · factor [V, N]``; in fp32 piece after piece of the vocabulary."""
    for at, (start, stop) in enumerate(configs.vocabulary_pieces(factor.shape[0], factor.element_size())):
        left, right = gradient[:, start:stop], factor[start:stop]
        if at == 0:
            torch.mm(left, right, out=out)
        else:
            torch.addmm(out, left, right, out=out)
    return out


def walk(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    lora: Lora | None,
    tokens: Tensor | None,
    *,
    ignore_index: int,
    mean: bool,
    x_gradient: bool,
    lora_gradient: bool,
) -> Found:
    """Loss of every row of ``x [T, H]`` and the gradients asked for.

    Memory beside the results: ``configs.CHUNK_BYTES`` of logits at most (one row at least).
    """
    T, V = x.shape[0], weight.shape[0]
    counts, factors = count_targets(targets, tokens, V, ignore_index, mean)
    rows = torch.empty(T, dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if x_gradient else None
    lora_gradient = lora_gradient and lora is not None
    da = torch.zeros(lora.a.shape, dtype=torch.float32, device=x.device) if lora is not None and lora_gradient else None
    db = torch.zeros(lora.b.shape, dtype=torch.float32, device=x.device) if lora is not None and lora_gradient else None
    C = configs.chunk_rows(T, V, x.element_size())
    padded = torch.empty((min(C, T), configs.stride(V)), dtype=x.dtype, device=x.device)
    for start in range(0, T, C):
        piece = slice(start, min(start + C, T))
        x_piece, buffer = x[piece], padded[: piece.stop - start]
        logits = buffer[:, :V]
        torch.mm(x_piece, weight.t(), out=logits)
        shrunk = None
        if lora is not None:
            shrunk = x_piece @ lora.a.t()
            torch.addmm(logits, shrunk, lora.b.t(), alpha=lora.scale, out=logits)
        loss_pass(buffer, targets[piece], factors, rows[piece], V, ignore_index, x_gradient or lora_gradient)
        if dx is not None:
            over_vocabulary(logits, weight, dx[piece])
        if lora is None or shrunk is None or not (x_gradient or lora_gradient):
            continue
        back = over_vocabulary(logits, lora.b, x.new_empty((logits.shape[0], lora.b.shape[1])))
        if dx is not None:
            dx[piece].addmm_(back, lora.a, alpha=lora.scale)
        if da is not None and db is not None:
            da.add_(back.t() @ x_piece, alpha=lora.scale)
            db.add_(logits.t() @ shrunk, alpha=lora.scale)
    return Found(rows, counts, factors, dx, da, db)


def scaled(gradient: Tensor, scale: Tensor, factors: Tensor, dtype: torch.dtype, *, per_row: bool) -> Tensor:
    """``gradient · scale · 2⁻ᵉ`` in ``dtype``, one rounding.

    ``scale`` is fp32: one value, or one for each row of ``gradient`` where ``per_row``.
    """
    result = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    n = gradient.numel()
    if n == 0:
        return result
    with device.current(gradient):
        scale_rows_kernel[(-(-n // configs.SCALE_BLOCK),)](
            gradient,
            scale,
            factors,
            result,
            n,
            gradient.shape[-1],
            PER_ROW=per_row,
            BLOCK=configs.SCALE_BLOCK,
            num_warps=configs.SCALE_WARPS,
        )
    return result
