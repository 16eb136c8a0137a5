"""Start of the stacks' gradients, for full training.

Legend: R rows, E experts, N and M a stack's last two dims.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from shardwright.kernels import device
from shardwright.kernels.bound import again, key_of, start
from shardwright.kernels.grouped_lora_mlp import configs
from shardwright.kernels.grouped_lora_mlp.rows import Rows
from shardwright.kernels.grouped_lora_mlp.stack_grad_triton import stack_grad_kernel


class Operand(NamedTuple):
    """One side of a stack's gradient: rows, or tokens to ``gather``; ``weighted`` by the rows' routing weights."""

    values: Tensor
    gather: bool = False
    weighted: bool = False


def launch_stack_grad(role: str, q: Operand, p: Operand, rows: Rows, weights: Tensor | None, out: Tensor) -> None:
    """Fill ``out [E, N, M]`` with ``Σ q[row]ᵀ p[row]`` over each expert's rows; zeros for one without rows."""
    tensors = (q.values, p.values, out, rows.tiles.offsets, rows.entry, weights)
    key = key_of(rows.token, role, weights is None)
    if again(key, tensors):
        return
    N, M = out.shape[1:]
    at = configs.stack_grad(q.values.element_size(), rows.count, rows.tiles.experts)
    gathers = rows.entry is not None
    with device.current(out):
        start(
            key,
            tensors,
            stack_grad_kernel,
            (-(-N // at.BN) * -(-M // at.BM), rows.tiles.experts),
            *tensors[:3],
            rows.tiles.offsets if rows.entry is None else rows.entry,
            q.values if weights is None else weights,
            rows.tiles.offsets,
            N,
            M,
            rows.slots,
            GATHER_Q=q.gather and gathers,
            GATHER_P=p.gather and gathers,
            WEIGHT_Q=q.weighted and weights is not None,
            WEIGHT_P=p.weighted and weights is not None,
            INNER=configs.inner_steps(q.values.element_size(), at.BR),
            BR=at.BR,
            BN=at.BN,
            BM=at.BM,
            num_warps=at.warps,
            num_stages=at.stages,
        )
