"""Exit codes and error texts are a frozen interface."""

from __future__ import annotations

import pickle

from shardwright.schemas import errors
from shardwright.schemas.errors import CheckpointError, ExitCode, ShardwrightError


def test_exit_codes_are_frozen() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "ERROR": 1,
        "USAGE": 2,
        "NEEDS_APPROVAL": 3,
        "POLICY_DENIED": 4,
        "STALE_PLAN": 5,
        "LEGALITY_FAILED": 6,
        "INFEASIBLE": 7,
        "LLM_UNAVAILABLE": 8,
        "CHECK_FAILED": 9,
        "INTERRUPTED": 130,
    }


def test_areas_are_unique() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ShardwrightError)]
    areas = [c.area for c in classes]
    assert len(areas) == len(set(areas))


def test_error_says_what_where_and_next_and_survives_pickling() -> None:
    error = CheckpointError(
        "truncated-shard", "ends at 10 of 20 bytes", where="a.safetensors", next_action="copy it again"
    )
    again = pickle.loads(pickle.dumps(error))
    assert again.as_dict() == error.as_dict()
    assert str(error).splitlines() == [
        "[checkpoint/truncated-shard] ends at 10 of 20 bytes",
        "  where: a.safetensors",
        "  next:  copy it again",
    ]
