"""A plan pins the weights' values, and says how far."""

from __future__ import annotations

import pytest
import workflow_fakes as fakes

from shardwright.schemas.errors import ApprovalError
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.schemas.profile import WeightsPin
from shardwright.workflows.drive import drive
from shardwright.workflows.report.markdown import markdown_plan

H = "ab" * 32


@pytest.fixture
def planned(tmp_path, request_of):
    """The plan of a checkpoint of 10 bytes whose weights are pinned so."""

    def make(pin: WeightsPin, name: str = "run") -> AdaptationPlan:
        with pytest.raises(ApprovalError):
            drive(request_of(), tmp_path / name, stages=fakes.fake_stages(weights=lambda folder: pin))
        return load_plan(tmp_path / name / "plan.json")

    return make


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        (WeightsPin(files={"a": H}, read_bytes=10), "values are pinned whole, spread over 1 file."),
        (WeightsPin(files={"a": H, "b": H}, read_bytes=4), "values are pinned by 4 B of 10 B, spread over 2 files."),
        (WeightsPin(), "values are not pinned: the plan was made from headers alone."),
    ],
)
def test_the_plan_says_how_far_values_are_pinned(planned, pin, words) -> None:
    plan = planned(pin)
    assert plan.decision.weights == pin
    (line,) = [one for one in plan.evidence.explanation if "values" in one]
    assert line.endswith(words) and line in markdown_plan(plan)


def test_other_values_are_another_decision(planned) -> None:
    one = planned(WeightsPin(files={"a": H}, read_bytes=10), "one")
    two = planned(WeightsPin(files={"a": "cd" * 32}, read_bytes=10), "two")
    assert one.hashes.decision != two.hashes.decision and one.hashes.evidence == two.hashes.evidence
