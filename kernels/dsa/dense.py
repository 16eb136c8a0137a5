"""Gated multi-head latent attention without a selection: dense attention of torch's libraries, our gate.

Kimi K3's layers of this kind rotate nothing and see all keys. Their attention is what cuDNN and flash attention do
best; what is left to fuse is the sigmoid gate, one pass over the output in place of torch's two, and one backward in
place of four.

Legend: T tokens, H heads, D, V widths of query and value.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.kernels import device, guards
from shardwright.kernels.dsa import contract
from shardwright.kernels.dsa.contract import NAME
from shardwright.kernels.dsa.triton import gate_backward_kernel, gate_kernel

BLOCK, WARPS = 2048, 8
LIBRARIES = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
"""In order of preference on a device; torch's plain products are refused there, for they keep all scores."""


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor) -> Tensor:
        y = torch.empty_like(o)
        if o.numel():
            with device.current(o):
                gate_kernel[(-(-o.numel() // BLOCK),)](o, gate, y, o.numel(), BLOCK=BLOCK, num_warps=WARPS)
        ctx.save_for_backward(o, gate)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        o, gate = ctx.saved_tensors
        dy = dy.contiguous()
        do, dgate = torch.empty_like(o), torch.empty_like(gate)
        if o.numel():
            with device.current(o):
                gate_backward_kernel[(-(-o.numel() // BLOCK),)](
                    dy, o, gate, do, dgate, o.numel(), BLOCK=BLOCK, num_warps=WARPS
                )
        return do, dgate


def sigmoid_gate(o: Tensor, gate: Tensor) -> Tensor:
    """``o · σ(gate)`` of two dense tensors of one shape, computed in fp32 and rounded once.

    Raises:
        KernelError: ``wrong-shape``, ``dtype-mixed``, ``dtype-unsupported``, ``device-mixed``,
            ``device-unsupported``, ``not-contiguous`` or ``misaligned``.
    """
    both = {"o": o, "gate": gate}
    guards.same_shape(NAME, both)
    guards.one_dtype(NAME, both, contract.DTYPES)
    guards.one_device(NAME, both, interpreted=device.interpreted())
    guards.dense(NAME, both)
    return cast(Tensor, _Gate.apply(o, gate))


def gated_mla_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    *,
    scale: float,
    cu_seqlens: Sequence[int] | None = None,
) -> Tensor:
    """Causal dense attention of packed documents, gated.

    Args:
        q: ``[T, H, D]``.
        k: ``[T, H, D]``, up-projected from the latent.
        v: ``[T, H, V]``.
        gate: ``[T, H, V]`` before its sigmoid; none leaves the output as it is.
        scale: of the scores.
        cu_seqlens: ends of the documents, ``0 = c₀ < c₁ < … = T``; one document where ``None``.

    Returns:
        ``[T, H, V]``.

    Raises:
        KernelError: ``wrong-shape``, ``cu-seqlens-unsorted``, ``no-dense-kernel`` where no library serves these
            widths on this device, and those of ``sigmoid_gate``.
    """
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if any(len(shape) != 3 for shape in shapes) or shapes[0] != shapes[1] or shapes[2][:2] != shapes[0][:2]:
        raise guards.refuse(NAME, "wrong-shape", f"q, k, v are {shapes}", "pass [T, H, D], [T, H, D] and [T, H, V]")
    T = q.shape[0]
    ends = [0, T] if cu_seqlens is None else [int(end) for end in cu_seqlens]
    rising = all(a < b for a, b in itertools.pairwise(ends))
    if T and not (rising and len(ends) > 1 and ends[0] == 0 and ends[-1] == T):
        what = f"cu_seqlens is {ends[:8]} for {T} tokens"
        raise guards.refuse(NAME, "cu-seqlens-unsorted", what, f"pass 0, rising ends, {T}")
    if T:
        parts = [_dense(q[a:b], k[a:b], v[a:b], scale) for a, b in itertools.pairwise(ends)]
    else:
        parts = [v + 0 * (q.sum() + k.sum())]  # no library call, and every input stays in the graph
    o = parts[0] if len(parts) == 1 else torch.cat(parts)
    return o if gate is None else sigmoid_gate(o.contiguous(), gate)


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)
    try:
        with sdpa_kernel(list(LIBRARIES), set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        what = f"no library attends with widths {q.shape[3]} and {v.shape[3]} in {q.dtype}"
        raise guards.refuse(NAME, "no-dense-kernel", what, "keep this layer's own attention") from error
