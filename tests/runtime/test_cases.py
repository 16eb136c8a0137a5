"""Single reported faults without a file of their own: a group of one rank (D4), load, resume, launch (G5, G8, H5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwright.runtime.device import open_device
from shardwright.runtime.launch import local
from shardwright.runtime.mesh import open_mesh
from shardwright.runtime.optimizer import AdapterOptimizer
from shardwright.runtime.ownership import local_values
from shardwright.runtime.session import build
from shardwright.runtime.state import Saver, load


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_launch_inside_a_started_rank_starts_no_other(
    tiny: Any, make_job: Any, strategy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5: where RANK is set, a launcher is above already."""
    job = make_job(tiny, strategy())
    seen: list[list[str]] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("shardwright.runtime.worker.main", lambda arguments: seen.append(arguments) or 5)
    monkeypatch.setattr(local.subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a nested launch"))
    assert local.launch(job.plan_path, tiny.checkpoint, tiny.data, job.approvals, job.run_dir) == 5
    assert seen[0][seen[0].index("--run-dir") + 1] == str(job.run_dir.resolve())


@pytest.mark.parametrize(("factor", "expected"), [(4.0, 0.5), (1.0, 2.0)])
def test_a_group_of_one_rank_obeys_its_divide_factor(factor: float, expected: float, process_group: None) -> None:
    """D4: the runtime sets 1 on every unit, so that gradients are sums; here that, and that 4 would divide."""
    unit = nn.Linear(1, 1, bias=False)
    fully_shard(unit, mesh=init_device_mesh("cpu", (1,)))
    unit.set_gradient_divide_factor(factor)  # type: ignore[operator]
    unit(torch.full((1, 1), 2.0)).sum().backward()
    assert float(local_values(unit.weight.grad)) == expected  # type: ignore[arg-type]


def test_tied_head_is_the_embedding_after_a_streamed_load(
    qwen: Any, make_job: Any, strategy: Any, process_group: None
) -> None:
    """G8: nothing is left on meta, and the head still shares the embedding's storage."""
    job = make_job(qwen, strategy())
    device = open_device("cpu", 0)
    model: Any = build(
        job.plan, qwen.checkpoint, open_mesh(job.plan.decision.strategy.mesh, device), device, None
    ).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(value.is_meta for value in [*model.parameters(), *model.buffers()])


def test_adapters_that_were_never_stepped_round_trip(
    tiny: Any, make_job: Any, strategy: Any, process_group: None, tmp_path: Path
) -> None:
    """G5: no optimizer state yet is saved as none (zeros), and loads; values are the initial ones."""
    job = make_job(tiny, strategy())
    device = open_device("cpu", 0)
    ranks = open_mesh(job.plan.decision.strategy.mesh, device)
    live = build(job.plan, tiny.checkpoint, ranks, device, None)
    optimizer = AdapterOptimizer(live.adapters, job.plan.decision.recipe.optimizer, ranks)
    saver = Saver(tmp_path, job.plan, live.adapters, optimizer, ranks, device)
    folder = saver.start(0, {})
    saver.finish()
    before = {name: owned.local().clone() for name, owned in live.adapters.items()}
    for owned in live.adapters.values():
        owned.local().fill_(7.0)
    load(folder, 0, live.adapters, optimizer, ranks, device)
    assert all(torch.equal(owned.local(), before[name]) for name, owned in live.adapters.items())
    assert all(not moment.any() for pair in optimizer.moments().values() for moment in pair.values())
