"""Expert loads of a run become shares by layer; an edit places experts by them, or says that there are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import workflow_fakes as fakes

from shardwright.runtime.experts.placement import check_slots, slots_of
from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.errors import LegalityError, UsageError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.run import ExpertLoad, RunRecord
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.placement import with_places
from shardwright.workflows.edited_strategy import edited
from shardwright.workflows.review.session import ReviewSession
from shardwright.workflows.review.trial import attempt
from shardwright.workflows.search_options import (
    SearchOptions,
    expert_shares,
    loads_of,
    stages_with,
    with_loads,
)


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


LOADS = ((0.7, 0.1, 0.1, 0.1), (0.1, 0.1, 0.2, 0.6))
BALANCED = {"mesh.shard": "1", "mesh.ep": "2", "expert_placement": "balanced"}


@pytest.fixture
def session(finished: Any, tmp_path: Path) -> ReviewSession:
    """A plan under review that was made without loads."""
    path = tmp_path / "review" / "plan.json"
    finished.plan.save(path)
    return ReviewSession.open(path, actor="ada", stages=fakes.fake_stages())


def placing(session: ReviewSession) -> ReviewSession:
    """The same plan, made with measured loads."""
    place = stages_with(SearchOptions(loads=LOADS)).place
    return ReviewSession.open(session.file, actor="ada", stages=replace(session.stages, place=place))


def test_an_edit_to_placed_experts_without_loads_says_where_loads_come_from(session: ReviewSession) -> None:
    before = session.file.read_bytes()
    with pytest.raises(LegalityError) as caught:
        session.edit(BALANCED, "even out")
    assert caught.value.code == "legality/placement-needs-loads"
    assert "plan --load-profile" in caught.value.next_action
    assert session.file.read_bytes() == before and not (session.file.parent / "plans").exists()
    trial = attempt(session.stages, session.plan, BALANCED, None, "2026-01-01")
    assert trial.child is None and trial.error is not None and trial.error.code == caught.value.code


def test_an_edit_to_placed_experts_takes_their_places_from_the_plans_loads(session: ReviewSession) -> None:
    """The hottest expert of each layer stands apart from the next; copies make new places, another mesh too."""
    session = placing(session)
    session.edit(BALANCED, "even out")
    placed = session.plan.decision.strategy
    for layer, shares in zip(slots_of(placed), LOADS, strict=True):
        check_slots(layer, 4, 2, "the edited plan")
        halves = [sum(shares[expert] for expert in layer[:2]), sum(shares[expert] for expert in layer[2:])]
        assert max(halves) == pytest.approx({0.7: 0.8, 0.6: 0.7}[max(shares)])
    assert [edit.field for edit in session.plan.decision.edits][-2:] == [
        "strategy.expert_placement",
        "strategy.expert_slots",
    ]
    session.edit({"redundant_experts": "1"}, "copy the hottest")
    copied = session.plan.decision.strategy
    for layer in slots_of(copied):
        check_slots(layer, 4, 2, "the edited plan")
        assert len(layer) == 6
    session.edit({"checkpointing": "full"}, "less memory")
    assert session.plan.decision.strategy.expert_slots == copied.expert_slots
    session.edit({"expert_placement": "contiguous"}, "plain again")
    assert session.plan.decision.strategy.expert_slots == () == slots_of(session.plan.decision.strategy)


def test_places_of_another_mesh_do_not_outlive_it(session: ReviewSession) -> None:
    """Without loads a placed plan may change what its places do not depend on, and nothing else."""
    placed = placing(session)
    placed.edit(BALANCED, "even out")
    bare = ReviewSession.open(session.file, actor="ada", stages=fakes.fake_stages())
    bare.edit({"checkpointing": "full"}, "less memory")
    with pytest.raises(LegalityError, match="made without loads"):
        bare.edit({"redundant_experts": "1"}, "copy the hottest")


def test_a_plan_keeps_the_loads_that_it_was_made_by(session: ReviewSession) -> None:
    """A plan file that has left its run still knows them; one that was made without reads as it did before."""
    bare = session.plan
    assert with_loads(bare, ()) is bare and loads_of(bare) == () and b"expert_loads" not in bare.to_bytes()
    kept = with_loads(bare, LOADS)
    assert kept.evidence.expert_loads == ("700000,100000,100000,100000", "100000,100000,200000,600000")
    assert kept.hashes.decision == bare.hashes.decision and kept.hashes.evidence != bare.hashes.evidence
    kept.save(session.file)
    elsewhere = ReviewSession.open(session.file, actor="ada")
    assert loads_of(elsewhere.plan) == LOADS and elsewhere.stages.place is not None
    wanted = ParallelStrategy(mesh=Mesh(ep=2), expert_placement="balanced")
    assert elsewhere.stages.place(wanted).expert_slots == with_places(wanted, LOADS).expert_slots


def test_only_options_with_loads_place_experts() -> None:
    assert stages_with(SearchOptions(explore=True)).place is None and stages_with(SearchOptions()).place is None
