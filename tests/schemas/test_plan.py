"""Plan bytes: two hashes over the file as it stands, and refusals that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.errors import ExitCode, PlanError
from shardwright.schemas.plan import AdaptationPlan, load_plan, parse_plan

GOLDEN = Path(__file__).parent.parent / "golden"


def code_of(data: bytes) -> str:
    with pytest.raises(PlanError) as caught:
        parse_plan(data, where="plan.json")
    assert caught.value.exit_code == ExitCode.STALE_PLAN
    return caught.value.code.split("/")[1]


def test_round_trip_gives_the_same_bytes(plan: AdaptationPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    again = load_plan(path)
    assert again.hashes == plan.hashes
    assert again.to_bytes() == path.read_bytes() == plan.to_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_hashes_cover_the_sections_as_written(plan: AdaptationPlan) -> None:
    raw = json.loads(plan.to_bytes())
    assert sha256_of(raw["decision"], floats=False) == plan.hashes.decision
    assert sha256_of(raw["evidence"]) == plan.hashes.evidence


def test_every_leaf_of_the_decision_is_guarded(plan: AdaptationPlan) -> None:
    """Changing any one leaf of the decision is noticed."""
    raw = json.loads(plan.to_bytes())

    def leaves(node: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        if isinstance(node, dict):
            return [leaf for key, value in node.items() for leaf in leaves(value, (*path, key))]
        if isinstance(node, list):
            return [leaf for i, value in enumerate(node) for leaf in leaves(value, (*path, i))]
        return [path]

    paths = leaves(raw["decision"])
    assert len(paths) > 60
    for path in paths:
        changed = json.loads(plan.to_bytes())
        node = changed["decision"]
        for key in path[:-1]:
            node = node[key]
        old = node[path[-1]]
        node[path[-1]] = (not old) if isinstance(old, bool) else old + 1 if isinstance(old, int) else f"{old}1"
        assert code_of(json.dumps(changed).encode()) in {"decision-edited", "invalid"}, path


def test_edited_evidence_is_noticed(plan: AdaptationPlan) -> None:
    raw = json.loads(plan.to_bytes())
    raw["evidence"]["cost"]["time"]["step_ms"] = 1.0
    assert code_of(json.dumps(raw).encode()) == "evidence-edited"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{", "unreadable"),
        (b"\xff\xfe", "unreadable"),
        (b"[]", "schema-version"),
        (b'{"schema_version": 2}', "schema-version"),
    ],
)
def test_damaged_and_foreign_files(data: bytes, code: str) -> None:
    assert code_of(data) == code


def test_half_written_plan(plan: AdaptationPlan) -> None:
    assert code_of(plan.to_bytes()[: len(plan.to_bytes()) // 2]) == "unreadable"


def test_unknown_key_is_named(plan: AdaptationPlan) -> None:
    raw = json.loads(plan.to_bytes())
    raw["decision"]["strategy"]["surprise"] = 1
    with pytest.raises(PlanError, match=r"decision\.strategy\.surprise: unknown key"):
        parse_plan(json.dumps(raw).encode(), where="plan.json")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="plan/missing"):
        load_plan(tmp_path / "none.json")


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("plan-v*.json")), ids=lambda p: p.name)
def test_golden_plans_still_load(path: Path) -> None:
    """One golden plan a schema version: a change that breaks it needs a new version and a migration."""
    plan = load_plan(path)
    assert plan.to_bytes() == path.read_bytes()
    assert f"plan-v{plan.schema_version}.json" == path.name


def test_there_is_a_golden_plan_of_this_version() -> None:
    assert (GOLDEN / "plan-v1.json").is_file()
