"""Expert loads of a run become shares by layer; an edit that gives up a placement gives up its places."""

from __future__ import annotations

from pathlib import Path

import pytest
import workflow_fakes as fakes

from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.errors import UsageError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.run import ExpertLoad, RunRecord
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.workflows.edits import edited
from shardwright.workflows.search_options import expert_shares


def record(loads: dict[str, tuple[int, ...]], folder: Path) -> Path:
    made = RunRecord(
        decision_sha256=fakes.H,
        evidence_sha256=fakes.H,
        status="trained",
        world_size=1,
        device="CPU",
        versions={},
        expert_loads=tuple(ExpertLoad(layer=layer, tokens=tokens) for layer, tokens in loads.items()),
    )
    write_atomic(folder / "run.json", pretty_bytes(made))
    return folder


def test_layers_of_a_resumed_run_come_in_the_models_order(tmp_path: Path) -> None:
    """A layer without rows keeps its place, with even shares: the places of the others must not move up."""
    names = ["model.layers.10.mlp.experts", "model.layers.2.mlp.experts", "model.layers.9.mlp.experts"]
    loads = dict(zip(names, ((3, 1), (1, 1), (0, 0)), strict=True))
    assert expert_shares(record(loads, tmp_path)) == ((0.5, 0.5), (0.5, 0.5), (0.75, 0.25))
    with pytest.raises(UsageError):
        expert_shares(record({"model.layers.0.mlp.experts": (0, 0)}, tmp_path))


def test_contiguous_experts_have_no_places() -> None:
    placed = ParallelStrategy(
        mesh=Mesh(ep=2), expert_placement="balanced", redundant_experts=1, expert_slots=("0,1,2,0,3,1",)
    )
    plain = edited(placed, {"expert_placement": "contiguous"})
    assert (plain.expert_slots, plain.redundant_experts) == ((), 0)
    assert edited(placed, {"micro_batch_sequences": "2"}).expert_slots == placed.expert_slots
