"""Under Triton's interpreter: rows moved by kernels are those that torch moves, forward and backward.

Legend: T tokens, K choices, E experts, H hidden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwright.runtime.experts.dispatch import as_they_came, combine, dispatch, grouped, plan_route, route_of
from shardwright.runtime.experts.rows import TORCH, Rows
from shardwright.runtime.experts.rows_fused import KernelRows

H = 48


def there_and_back(by: Rows, ids: Tensor, experts: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(len(ids), H, generator=generator, requires_grad=True)
    weights = torch.rand(ids.shape, generator=generator, requires_grad=True)
    scale = torch.randn(ids.numel(), 1, generator=generator)
    route = plan_route(ids, experts, 1, None, by)
    rows = dispatch(hidden, route, None, None, by)
    out = combine(rows * scale, route, weights, None, by)
    out.backward(torch.randn(out.shape, generator=generator))
    assert hidden.grad is not None and weights.grad is not None
    return [rows.detach(), out.detach(), hidden.grad, weights.grad, route.local_counts, torch.tensor(route.sizes)]


@pytest.mark.parametrize(("T", "K", "E"), [(13, 3, 5), (1, 1, 4), (40, 2, 2), (0, 2, 4)])
def test_kernels_move_what_torch_moves(T: int, K: int, E: int) -> None:
    """With experts that nobody chose, and twice: the second time launches are bound."""
    ids = torch.rand(T, E, generator=torch.Generator().manual_seed(T)).topk(K).indices.clamp(min=1)
    expected = there_and_back(TORCH, ids, E)
    for _ in range(2):
        for ours, theirs in zip(there_and_back(KernelRows(), ids, E), expected, strict=True):
            assert torch.allclose(ours.double(), theirs.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("by", [TORCH, KernelRows()], ids=["torch", "kernels"])
def test_received_rows_are_grouped_in_the_order_of_ranks_and_go_back(by: Rows) -> None:
    """Three ranks' rows for two experts, one rank sends nothing; the gradient comes back in place."""
    arriving = torch.tensor([[2, 1], [0, 0], [1, 3]])
    names = torch.tensor([0, 1, 10, 20, 11, 12, 13])
    rows = names.float().unsqueeze(1).repeat(1, H).requires_grad_()
    counts, leaves = by.sort(torch.zeros((1, 1), dtype=torch.int64), 2)
    route = route_of(leaves, counts, arriving, [[]], arriving.tolist())
    there = grouped(rows, route, by)
    assert there[:, 0].tolist() == [0, 1, 20, 10, 11, 12, 13]
    back = as_they_came(there * 2, route, by)
    assert torch.equal(back, rows * 2)
    back.backward(names.float().unsqueeze(1).repeat(1, H))
    assert rows.grad is not None and torch.equal(rows.grad[:, 0], 2 * names.float())
