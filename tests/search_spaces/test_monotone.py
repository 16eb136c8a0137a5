"""Memory never falls with longer sequences, whatever the attention, packing and mesh: thousands of explored plans."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import workload
from shardwright.search_spaces.cost.fusion import FusedProviders
from shardwright.search_spaces.cost.memory import memory_of
from shardwright.search_spaces.space import enumerate_plans

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
models = importlib.import_module("models")

KERNELS = FusedProviders({op: ("shardwright", ()) for op in ("kda", "dsa", "router", "swiglu", "linear_cross_entropy")})


@pytest.mark.parametrize("fused", [FusedProviders(), KERNELS], ids=["eager", "fused"])
@pytest.mark.parametrize(
    ("model", "further"), [("kimi_linear", ()), ("glm_5", ()), ("qwen3_30b", ()), ("kimi_k3", ("mxfp4",))]
)
def test_memory_never_falls_with_longer_sequences(model: str, further: tuple[str, ...], fused: FusedProviders) -> None:
    profile, cluster = getattr(models, model)(*further), load_cluster("h200-128")
    targets = models.targets_for(profile, rank=16)
    context = SearchContext(profile, models.recipe_for(batch=256, tokens=2048), cluster, explore=True)
    table = enumerate_plans(context)
    some = table.plans.take(np.arange(0, len(table), max(1, len(table) // 3000)))
    before = None
    for tokens in (2048, 2112, 4096, 8192, 32768):
        work = workload(profile, models.recipe_for(batch=256, tokens=tokens), targets)
        found = memory_of(work, cluster, some, fused)
        if before is not None:
            assert (found.peak >= before.peak).all(), tokens
            assert (found.reserved >= before.reserved).all(), tokens
        before = found
