"""Context parallelism: each rank owns a run of queries and gathers all keys.

One key head of 576 values is all that a token has, 1,152 bytes in bf16: 32,768 tokens are 36 MiB, where gathering the
up-projected keys and values of 64 heads would move 71 times that. Indices are rows of the gathered keys; bounds for
a rank come from ``visibility.bounds_of(..., first_query=rank * T)``.

Legend: T tokens of a rank, S tokens of the group, V latent width, R rotated width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.kernels import guards
from shardwright.kernels.dsa.attention.contract import NAME


class _Gather(torch.autograd.Function):
    """All rows of all ranks, in their order; gradients are added in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
        dist.all_gather_into_tensor(whole, rows.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        own = wide.new_empty((wide.shape[0] // ctx.group.size(), *wide.shape[1:]))
        dist.reduce_scatter_tensor(own, wide, group=ctx.group)
        return own.to(gradient.dtype), None


def gather_keys(latent: Tensor, k_rope: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Both key parts of all ranks by one collective, as views that the operator takes.

    Args:
        latent: ``[T, V]`` of this rank.
        k_rope: ``[T, R]``.
        group: ranks of one sequence, in its order, each with T tokens.

    Returns:
        ``[S, V]`` and ``[S, R]``; each rank's gradient is the sum over all ranks' queries.

    Raises:
        KernelError: ``wrong-shape`` or ``dtype-mixed``.
    """
    if latent.dim() != 2 or k_rope.dim() != 2 or latent.shape[0] != k_rope.shape[0]:
        what = f"latent is {list(latent.shape)}, k_rope is {list(k_rope.shape)}"
        raise guards.refuse(NAME, "wrong-shape", what, "pass [T, V] and [T, R]")
    guards.one_dtype(NAME, {"latent": latent, "k_rope": k_rope}, ("bfloat16", "float16", "float32", "float64"))
    whole = cast(Tensor, _Gather.apply(torch.cat((latent, k_rope), 1), group))
    return whole[:, : latent.shape[1]], whole[:, latent.shape[1] :]
