"""One product per expert over grouped rows, with a low-rank adapter: ``y = x Wᵀ + s (x Aᵀ) Bᵀ``.

Legend: N rows grouped by expert, L local experts, i in features, o out features, r rank, s scaling.
W is [L, o, i] (``out_in``) or [L, i, o] (``in_out``), frozen; A is [L, r, i], B is [L, o, r], or one pair [r, i],
[o, r] for all experts. Neither the full delta nor a merged weight is ever formed. Saved for backward: x and the [N, r]
inner product.
Experts without rows get a gradient of exactly zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNMENT_BYTES = 16
"""Row strides that the grouped matrix product accepts."""


class GroupedLoraLinear(torch.autograd.Function):
    """Grouped linear map with an optional adapter; the base weight never gets a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        sizes: list[int],
        scaling: float,
        in_out: bool,
    ) -> Tensor:
        shared = lora_a is not None and lora_a.dim() == 2
        run = _choose(x, weight, None if shared else lora_a)
        low = _Shared if shared else run
        y = run.rows(x, weight if in_out else weight.mT, sizes)
        inner = None
        if lora_a is not None and lora_b is not None:
            inner = low.rows(x, lora_a.mT, sizes)
            low.add_rows(y, inner, lora_b.mT, sizes, scaling)
        if bias is not None:
            y += bias.repeat_interleave(torch.tensor(sizes, device=x.device), dim=0, output_size=x.shape[0])
        ctx.save_for_backward(x if lora_a is not None else None, weight, lora_a, lora_b, inner)
        ctx.sizes, ctx.scaling, ctx.in_out, ctx.run, ctx.low = sizes, scaling, in_out, run, low
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, lora_a, lora_b, inner = ctx.saved_tensors
        dy, sizes, run, low = gradients[0].contiguous(), ctx.sizes, ctx.run, ctx.low
        da = db = dinner = None
        if lora_a is not None:
            dinner = low.rows(dy, lora_b, sizes).mul_(ctx.scaling)
            da = low.outer(dinner, x, sizes)
            db = low.outer(dy, inner, sizes).mul_(ctx.scaling)
        # Rows that a recomputation made are freed before dx is there.
        del x, inner
        dx = run.rows(dy, weight.mT if ctx.in_out else weight, sizes) if ctx.needs_input_grad[0] else None
        if dx is not None and dinner is not None:
            low.add_rows(dx, dinner, lora_a, sizes, 1.0)
        return dx, None, None, da, db, None, None, None


class _Loop:
    """One library product per expert on contiguous row slices: the CPU path, and fp32 or unaligned shapes anywhere."""

    @staticmethod
    def rows(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        """[N, a] × [L, a, b] → [N, b]."""
        out = x.new_empty((x.shape[0], weight.shape[2]))
        start = 0
        for expert, size in enumerate(sizes):
            if size:
                torch.mm(x[start : start + size], weight[expert], out=out[start : start + size])
                start += size
        return out

    @staticmethod
    def add_rows(out: Tensor, x: Tensor, weight: Tensor, sizes: list[int], scaling: float) -> None:
        """``out += scaling · x × weight`` by group, in place."""
        start = 0
        for expert, size in enumerate(sizes):
            if size:
                out[start : start + size].addmm_(x[start : start + size], weight[expert], alpha=scaling)
                start += size

    @staticmethod
    def outer(left: Tensor, right: Tensor, sizes: list[int]) -> Tensor:
        """[N, a], [N, b] → [L, a, b], ``leftᵀ right`` of each group; zero where a group is empty."""
        out = left.new_zeros((len(sizes), left.shape[1], right.shape[1]))
        start = 0
        for expert, size in enumerate(sizes):
            if size:
                torch.mm(left[start : start + size].mT, right[start : start + size], out=out[expert])
                start += size
        return out


class _Grouped:
    """One launch for all experts (bf16 on CUDA)."""

    @staticmethod
    def rows(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        return grouped_mm(x, weight, _offsets(sizes, x.device))

    @staticmethod
    def add_rows(out: Tensor, x: Tensor, weight: Tensor, sizes: list[int], scaling: float) -> None:
        out.add_(grouped_mm(x, weight, _offsets(sizes, x.device)), alpha=scaling)

    @staticmethod
    def outer(left: Tensor, right: Tensor, sizes: list[int]) -> Tensor:
        return grouped_mm(left.mT, right, _offsets(sizes, left.device))


class _Shared:
    """One pair for the rows of all experts: ordinary products, whatever the groups."""

    @staticmethod
    def rows(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        """[N, a] × [a, b] → [N, b]."""
        return x @ weight

    @staticmethod
    def add_rows(out: Tensor, x: Tensor, weight: Tensor, sizes: list[int], scaling: float) -> None:
        """``out += scaling · x × weight``, in place."""
        out.addmm_(x, weight, alpha=scaling)

    @staticmethod
    def outer(left: Tensor, right: Tensor, sizes: list[int]) -> Tensor:
        """[N, a], [N, b] → [a, b]; zero without rows."""
        return left.mT @ right


Product = type[_Loop] | type[_Grouped] | type[_Shared]


def grouped_mm(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """The library's grouped product under either of its names; ``offsets`` are int32 ends of groups."""
    public = getattr(F, "grouped_mm", None)
    return public(left, right, offs=offsets) if public else torch._grouped_mm(left, right, offs=offsets)


def _offsets(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


def rows_product(x: Tensor, lora_a: Tensor | None) -> Product:
    """How an adapter's own products run, whatever way the base's run in."""
    if lora_a is not None and lora_a.dim() == 2:
        return _Shared
    return _Loop if lora_a is None else _choose(x, lora_a, lora_a)


def _choose(x: Tensor, weight: Tensor, lora_a: Tensor | None) -> type[_Loop] | type[_Grouped]:
    """The grouped product where it exists and every row stride is aligned and there is at least one row."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or x.shape[0] == 0:
        return _Loop
    widths = [*weight.shape[1:], *(lora_a.shape[1:] if lora_a is not None else ())]
    aligned = all(width * x.element_size() % ALIGNMENT_BYTES == 0 for width in widths)
    return _Grouped if aligned else _Loop
