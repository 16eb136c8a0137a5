"""Identity experts over two nodes of two ranks: values, gradients, and how many rows cross between the nodes."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from shardwright.runtime.experts.hierarchical import in_two_stages, open_nodes

E, H = 8, 6


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    nodes = open_nodes(4, rank, 4, 2)
    assert nodes is not None and (nodes.count, nodes.size, nodes.node) == (2, 2, rank // 2)
    sent: list[int] = []
    original = dist.all_to_all_single

    def counted(out: torch.Tensor, rows: torch.Tensor, *sizes: Any, group: Any, async_op: bool = False) -> Any:
        if group is nodes.across and rows.dim() == 2 and rows.shape[1] == H:
            sent.append(len(rows))
        return original(out, rows, *sizes, group=group, async_op=async_op)

    dist.all_to_all_single = counted
    generator = torch.Generator().manual_seed(rank)
    for tokens, chunks, before in ((0 if rank == 1 else 7, 1, False), (12, 1, True), (12, 3, False), (2, 3, True)):
        index = torch.stack([torch.randperm(E, generator=generator)[:3] for _ in range(tokens)] or [torch.zeros(3)])
        index = index[:tokens].long()
        hidden = torch.randn(tokens, H, generator=generator, requires_grad=True)
        weights = torch.rand(tokens, 3, generator=generator, requires_grad=True)
        sent.clear()
        idle: list[int] = []
        out = in_two_stages(
            *(hidden, index, weights, lambda rows, route: rows * 2, nodes, E),
            chunks=chunks,
            weigh_inputs=before,
            meanwhile=lambda idle=idle: idle.append(len(sent)),
        )
        torch.testing.assert_close(out, 2 * hidden * weights.sum(1, keepdim=True))
        pairs = sum(len({int(expert) // (E // 2) for expert in row}) for row in index)
        assert sum(sent[:chunks]) == pairs, "a token leaves once for every node of its experts"
        assert idle == [chunks], "what runs meanwhile runs once, when all chunks have left"
        assert pairs <= 2 * tokens < 3 * tokens or not tokens
        upstream = torch.randn(tokens, H, generator=generator)
        out.backward(upstream)
        torch.testing.assert_close(hidden.grad, 2 * upstream * weights.sum(1, keepdim=True))
        expected = 2 * (upstream * hidden).sum(1, keepdim=True).expand_as(weights)
        torch.testing.assert_close(weights.grad, expected)
    dist.barrier()
    sys.stdout.write(f"rank {rank} done\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
