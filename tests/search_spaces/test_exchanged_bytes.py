"""Bytes of routed rows on their way: what the cost model prices is what the runtime hands to its collectives.

One rank that sends its rows to itself: as many as any rank of an EP group gets from an even router.
Legend: T tokens, K experts per token, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwright.runtime.experts.dispatch import combine, dispatch, padded, plan_route
from shardwright.runtime.experts.overlap import in_chunks
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.cost import evaluate, workload
from shardwright.search_spaces.cost.memory_terms import rows_of
from shardwright.search_spaces.cost.plans import plans_of
from shardwright.search_spaces.cost.routing import rank_imbalance
from shardwright.search_spaces.cost.step_exchange import exchanged_bytes

T, K, E, H, EP = 512, 2, 8, 32, 4


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of every exchange of rows, in a process group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    original, found = dist.all_to_all_single, []

    def counted(out: torch.Tensor, rows: torch.Tensor, *sizes: Any, **options: Any) -> Any:
        if rows.is_floating_point():
            found.append(rows.nbytes)
        return original(out, rows, *sizes, **options)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    yield found
    dist.destroy_process_group()


def exchange(chunks: int, padding: int) -> None:
    """Forward and backward of one layer's dispatch and combine, experts that change nothing."""
    index = torch.rand(T, E, generator=torch.Generator().manual_seed(0)).topk(K).indices
    weights, hidden = torch.rand(T, K), torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
    group = dist.group.WORLD
    if chunks == 1:
        rows = T * K
        route = replace(padded(plan_route(index, E, 1, group), padding), send=[rows], receive=[rows])
        out = combine(dispatch(hidden, route, group), route, weights, group)
    else:
        out, _ = in_chunks(
            *(hidden, index, weights, lambda rows, route: rows),
            **dict(chunks=chunks, num_experts=E, ep=1, group=group, weigh_inputs=False, padding=padding),
        )
    out.float().sum().backward()


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("padding", [1, 16, 64])
def test_rows_travel_without_their_padding(sent: list[int], build: SimpleNamespace, chunks: int, padding: int) -> None:
    exchange(chunks, padding)
    assert len(sent) == 4 * chunks, "to the experts and back, and both gradients"
    profile = build.tiny(E)
    overlap = {"overlap": "chunked", "overlap_chunks": chunks} if chunks > 1 else {}
    strategy = ParallelStrategy(mesh=Mesh(ep=EP), expert_padding_tokens=padding, **overlap)
    recipe = build.recipe_of(batch=EP, tokens=T)
    work, plans = workload(profile, recipe, build.targets_of(profile, rank=8)), plans_of([strategy], profile)
    even = rank_imbalance(T, K, E, EP)
    travelling, computed = (rows_of(work, plans, plans.tokens(T), padded=padded) / even for padded in (False, True))
    assert float(4 * exchanged_bytes(work, travelling)[0]) == pytest.approx(sum(sent), rel=0.002)
    assert (computed > travelling).all() == (padding > 1)


def test_padding_costs_products_and_memory_but_no_exchange(build: SimpleNamespace) -> None:
    profile, cluster = build.qwen3_30b(), build.cluster_of("h200-128")
    work = workload(profile, build.recipe_of(batch=128, tokens=4096), build.targets_of(profile, rank=8))
    bare, wide = (ParallelStrategy(mesh=Mesh(ep=128), expert_padding_tokens=count) for count in (1, 512))
    costs = evaluate(work, cluster, plans_of([bare, wide], profile))
    times = {term.name: term.milliseconds for term in costs.times.terms}
    exchange = sum(times.get(name, np.zeros(2)) for name in ("expert_all_to_all", "expert_all_to_all_hidden"))
    assert exchange[0] > 0
    assert exchange[0] == pytest.approx(exchange[1], rel=1e-12)
    assert times["experts"][1] > times["experts"][0]
    assert costs.memory.peak[1] > costs.memory.peak[0]
