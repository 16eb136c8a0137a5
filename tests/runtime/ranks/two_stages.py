"""Identity experts over two nodes of two ranks: values, gradients, and how many rows cross between the nodes."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from shardwright.runtime.experts import dispatch
from shardwright.runtime.experts.hierarchical import in_two_stages, open_nodes

E, H = 8, 6


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    nodes = open_nodes(4, rank, 4, 2)
    assert nodes is not None and (nodes.count, nodes.size, nodes.node) == (2, 2, rank // 2)
    sent: list[tuple[bool, int]] = []
    original = dispatch.exchange

    def counted(rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        sent.append((group is nodes.across, sum(send)))
        return original(rows, send, receive, group)

    dispatch.exchange = counted
    generator = torch.Generator().manual_seed(rank)
    for tokens in (0 if rank == 1 else 7, 12):
        index = torch.stack([torch.randperm(E, generator=generator)[:3] for _ in range(tokens)] or [torch.zeros(3)])
        index = index[:tokens].long()
        hidden = torch.randn(tokens, H, generator=generator, requires_grad=True)
        weights = torch.rand(tokens, 3, generator=generator, requires_grad=True)
        sent.clear()
        out = in_two_stages(hidden, index, weights, lambda rows, route: rows * 2, nodes, E)
        torch.testing.assert_close(out, 2 * hidden * weights.sum(1, keepdim=True))
        pairs = sum(len({int(expert) // (E // 2) for expert in row}) for row in index)
        assert sent[0] == (True, pairs), (sent, pairs)
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
