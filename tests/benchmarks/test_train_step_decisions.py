"""The training-step cases run the operators that a plan for one H200 decides on, each on the same modules.

Shapes are the published ones, cut to the first layers of every kind; nothing but headers is written. A plan leaves the
loss eager where it is not modelled faster: the cases take its operator for its memory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.agents.structure import rank
from shardwright.agents.structure.join import recertify
from shardwright.agents.structure.run import run_structure
from shardwright.checkpoints.targets import resolve_targets
from shardwright.runtime.experts.balance import LoadMeter
from shardwright.runtime.lora.inject import inject
from shardwright.schemas.fusion import FusionDecision
from shardwright.schemas.recipe import LoraSpec
from shardwright.schemas.strategy import ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LAYERS = {"qwen3-30b": 1, "kimi-linear-48b": 4}
"""Kimi's first four are of all kinds: linear attention, dense and with experts; latent attention with experts."""
READ = {
    "rms_norm": ("eps",),
    "add_rms_norm": ("eps",),
    "qk_norm_rope": ("eps",),
    "moe_layer": ("activation",),
    "router": ("k", "scoring", "groups", "groups_kept", "group_score", "renormalise", "scale"),
    "kda": ("form", "heads", "value_heads", "key_width", "value_width", "gate", "act", "eps", "operators"),
}
"""Operator → constants that its module reads. Experts' stacks are found by name, so that their roles are not read."""
DEFAULTS = {"groups": 1, "groups_kept": 1, "group_score": "top2", "scale": "1"}
WIDE = ("logits_dtype", "logits_cast", "weights_dtype")
"""Constants of a router that ask for fp32."""


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    names = ("train_step_cases", "train_step_decisions", "train_step_ours", "points_model", "points_shapes")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(BENCHMARKS))


def planned(bench: Any, model: str, folder: Path) -> tuple[FusionDecision, ...]:
    """Ours among what the structure agent decides for one H200."""
    point = bench.points_shapes.Point("fused", model, ("q_proj",), LAYERS[model], 4096, 2, "full")
    profile = bench.points_model.headers_only(point, folder)
    recipe, cluster = bench.points_model.recipe_of(point), load_cluster("h200-1")
    found = run_structure(folder, profile, cluster, recipe)
    strategy = ParallelStrategy(mesh={"shard": 1}, checkpointing="full", micro_batch_sequences=2)  # type: ignore[arg-type]
    _, decisions = recertify(found.proposals, strategy, cluster, recipe)
    return tuple(one for one in decisions if one.provider == "shardwright")


def benched(bench: Any, model: str) -> tuple[FusionDecision, ...]:
    shape = bench.points_shapes.SHAPES[model]
    _, ranks = bench.train_step_ours.open_rank()
    point = bench.points_shapes.Point("fused", model, ("q_proj",), LAYERS[model], 4096, 2, "full")
    built = bench.points_model.plain_model(point, torch.bfloat16)
    family = str(built.config.model_type)
    shapes = {name: tuple(value.shape) for name, value in built.named_parameters()}
    targets = resolve_targets(shapes, LoraSpec(targets=("q_proj",), rank=16), model_type=family)
    inject(built, targets, model_type=family, ranks=ranks, meter=LoadMeter(), dropout=0.0, dtype=torch.float32)
    names = bench.train_step_decisions.FUSIONS
    used = tuple(name for name in names if name not in bench.train_step_decisions.WITHOUT[shape.config_class])
    made: tuple[FusionDecision, ...] = bench.train_step_decisions.decisions_for(built, used)
    return made


def by_module(decisions: tuple[FusionDecision, ...]) -> dict[tuple[str, str], tuple[Any, ...]]:
    """(operator, module) → what a worker reads of the decision."""
    found = {}
    for one in decisions:
        constants = {name: one.constants.get(name, DEFAULTS.get(name)) for name in READ[one.op]}
        constants |= {name: one.constants.get(name) == "float32" for name in WIDE}
        roles = {} if one.op in ("moe_layer", "qk_norm_rope") else dict(one.roles)
        for module in one.modules:
            found[one.op, module] = (constants, roles, one.source_sha256, dict(one.beside))
    return found


@pytest.mark.parametrize("model", list(LAYERS))
def test_a_case_runs_what_a_plan_would(bench: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "verified", lambda op, files: True)
    wanted = by_module(tuple(one for one in planned(bench, model, tmp_path) if one.op != "linear_cross_entropy"))
    found = by_module(tuple(one for one in benched(bench, model) if one.op != "linear_cross_entropy"))
    assert found == wanted
