"""Two stages over two nodes of two ranks: the same losses, and a token crosses to a node once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.runtime.experts.hierarchical import open_nodes
from shardwright.schemas.cluster import ClusterRef


def nodes_of_two() -> ClusterRef:
    return ClusterRef(
        name="two-nodes",
        digest="ab" * 32,
        device_type="cpu",
        device_name="cpu",
        world_size=4,
        devices_per_node=2,
        backend="gloo",
    )


def test_one_node_has_one_stage() -> None:
    assert open_nodes(4, 0, 4, 4) is None and open_nodes(4, 0, 2, 8) is None and open_nodes(6, 0, 3, 2) is None


@pytest.mark.slow
def test_hierarchical_dispatch_equals_one_process(
    tiny: Any, qwen: Any, make_job: Any, strategy: Any, on_ranks: Any, tmp_path: Path
) -> None:
    """Loss, norm and every adapter's gradient are plain transformers' on ep 4; rows that cross nodes are counted."""
    jobs = []
    for name, example, kept in (("mixtral", tiny, "none"), ("qwen3_moe", qwen, "full")):
        planned = strategy(ep=4, dispatch="hierarchical", checkpointing=kept)
        job = make_job(example, planned, cluster=nodes_of_two())
        jobs.append((name, str(job.plan_path), str(example.checkpoint)))
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    assert on_ranks(4, "families.py", str(path)).count("worst") == len(jobs)
    assert on_ranks(4, "two_stages.py").count("done") == 4
