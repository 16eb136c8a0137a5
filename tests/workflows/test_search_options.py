"""What `plan` adds to the search: loads of a run, calibration by hash, exploring."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.schemas.errors import UsageError
from shardwright.schemas.run import ExpertLoad, RunRecord
from shardwright.workflows.search_options import SearchOptions, expert_shares, stages_with
from shardwright.workflows.stages import Stages


def record(folder: Path, loads: tuple[ExpertLoad, ...]) -> Path:
    found = RunRecord(
        decision_sha256="0" * 64,
        evidence_sha256="0" * 64,
        status="trained",
        world_size=1,
        device="cpu",
        versions={},
        expert_loads=loads,
    )
    (folder / "run.json").write_text(found.model_dump_json())
    return folder


def test_shares_of_a_run_add_up_to_one(tmp_path: Path) -> None:
    loads = (ExpertLoad(layer="0", tokens=(3, 1, 0, 4)), ExpertLoad(layer="1", tokens=(0, 0, 0, 0)))
    assert expert_shares(record(tmp_path, loads)) == ((0.375, 0.125, 0.0, 0.5), (0.25, 0.25, 0.25, 0.25))


def test_a_run_without_loads_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, record(tmp_path, ())):
        with pytest.raises(UsageError) as error:
            expert_shares(folder)
        assert error.value.code == "usage/no-loads"


def test_without_options_the_usual_work_is_done() -> None:
    assert stages_with(SearchOptions()) == Stages()
    explored = stages_with(SearchOptions(explore=True))
    assert explored.search is not Stages().search and explored.launch is Stages().launch
