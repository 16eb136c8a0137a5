"""Linear attention is priced by the kernel that a plan gives it, whichever of the two, or as the chain that runs.

Legend: T tokens, n heads of width d.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.cost import price, workload
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.linear_attention import linear_attention_bytes
from shardwright.search_spaces.cost.workspaces import attention_workspace_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
models = importlib.import_module("models")

T, HEADS, WIDTH = 512, 2, 16
"""Tokens, heads and hidden width of the chain that runs; hidden so narrow that projections do not count."""


@pytest.mark.parametrize("op", ["kda", "gated_delta"])
def test_a_kernel_of_the_delta_rule_takes_the_place_of_the_chain(op: str) -> None:
    described, recipe = models.kimi_linear(), models.recipe_for(batch=8, tokens=4096)
    work = workload(described, recipe, models.targets_for(described, rank=16))
    strategy = ParallelStrategy(mesh=Mesh(shard=8), checkpointing="full")
    chain, fused = (
        price(work, load_cluster("h200-8"), strategy, FusedProviders(chosen))
        for chosen in ({}, {op: ("shardwright", ("model.layers.0.self_attn",))})
    )
    kept = [{c.name: c.bytes for c in report.memory.components}["recomputed_layer"] for report in (chain, fused)]
    assert kept[0] > 5 * kept[1] > 0
    assert fused.time.step_ms < chain.time.step_ms


def allocations(step: Callable[[], object], path: Path) -> list[dict[str, int]]:
    """What the allocator reported, in order; no dispatch mode is active, under which autograd sums out of place."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    seen.export_chrome_trace(str(path))
    return [event["args"] for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]


def test_the_chain_keeps_and_peaks_as_the_allocator_sees_it(tmp_path: Path) -> None:
    described, recipe = models.kimi_linear(), models.recipe_for(batch=1, tokens=T)
    shape, work = described.shape, workload(described, recipe, models.targets_for(described, rank=16))
    assert shape.linear_num_heads is not None and shape.linear_head_dim is not None
    config = KimiLinearConfig(hidden_size=WIDTH, linear_num_heads=HEADS, linear_head_dim=shape.linear_head_dim)
    layer = KimiLinearDeltaAttention(config, config.layer_types.index("linear_attention"))
    layer = layer.to(torch.bfloat16).requires_grad_(False)
    for values in layer.parameters():
        torch.nn.init.normal_(values, std=0.1)
    x = torch.randn(1, T, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    held: list[torch.Tensor] = []
    forward = allocations(lambda: held.append(layer(x)), tmp_path / "forward.json")
    backward = allocations(lambda: held.pop().sum().backward(), tmp_path / "backward.json")
    before = forward[0]["Total Allocated"] - forward[0]["Bytes"]
    kept = forward[-1]["Total Allocated"] - before
    peak = max(event["Total Allocated"] for event in backward) - before

    eager, tokens = FusedProviders({}), T * HEADS / shape.linear_num_heads
    ours = tokens * linear_attention_bytes(work, eager)
    assert kept == pytest.approx(ours, rel=0.02)
    (linear,) = (one for one in work.layers if one.kind.attention == "linear" and one.routed)
    assert peak == pytest.approx(ours + tokens * attention_workspace_bytes(work, linear, eager, True), rel=0.01)
