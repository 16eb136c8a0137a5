"""Edits make child plans; approvals never carry over; reviewers cannot race each other."""

from __future__ import annotations

import re

import pytest
import workflow_fakes as fakes

from shardwright.schemas.approval import find_approval, read_log
from shardwright.schemas.errors import ApprovalError, ExitCode, InfeasibleError, LegalityError, PlanError, UsageError
from shardwright.schemas.plan import load_plan
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.workflows.compare import differences
from shardwright.workflows.edited_strategy import completed, edited
from shardwright.workflows.edits import edit_axes, reject_proposal
from shardwright.workflows.review.session import ReviewSession
from shardwright.workflows.review.terminal import ask_until_decided, plan_text

STAGES = fakes.fake_stages()


@pytest.fixture
def session(finished, tmp_path) -> ReviewSession:
    path = tmp_path / "review" / "plan.json"
    finished.plan.save(path)
    return ReviewSession.open(path, actor="ada", stages=STAGES)


def test_an_edit_is_recosted_and_names_its_parent(session) -> None:
    parent = session.plan
    words = session.edit({"mesh.shard": "1", "mesh.ep": "2"}, "fewer gathers")
    child = load_plan(session.file)
    assert child.decision.parent_hash == parent.hashes.decision
    # The fake cost model: 4 GiB over shard.
    assert (parent.evidence.cost.memory.peak_bytes, child.evidence.cost.memory.peak_bytes) == (2 << 30, 4 << 30)
    assert "2 GiB → 4 GiB (+100.0%)" in words
    fields = {edit.field: (edit.old, edit.new) for edit in child.decision.edits}
    assert fields == {"strategy.mesh.shard": (2, 1), "strategy.mesh.ep": (1, 2)}
    kept = {load_plan(path).hashes.decision for path in (session.file.parent / "plans").iterdir()}
    assert kept == {parent.hashes.decision, child.hashes.decision}


def test_accumulation_follows_the_global_batch(session) -> None:
    session.edit({"micro_batch_sequences": "2"}, "fill the device")
    assert session.plan.decision.strategy.accumulation_steps == 1
    assert session.plan.decision.strategy.global_batch_sequences() == 4


@pytest.mark.parametrize(
    ("before", "values", "after"),
    [
        ("replicate1·shard2·ep1", {"mesh.ep": "2"}, "replicate1·shard1·ep2"),
        ("replicate2·shard1·ep1", {"mesh.ep": "2"}, "replicate1·shard1·ep2"),
        ("replicate2·shard4·ep1", {"mesh.ep": "2"}, "replicate2·shard2·ep2"),
        ("replicate2·shard4·ep1", {"mesh.ep": "8"}, "replicate1·shard1·ep8"),
        ("replicate2·shard4·ep1", {"mesh.shard": "2"}, "replicate4·shard2·ep1"),
        ("replicate2·shard4·ep1", {"mesh.replicate": "4"}, "replicate4·shard2·ep1"),
        ("replicate2·shard4·ep1", {"mesh.ep": "3"}, "replicate2·shard4·ep3"),
        ("replicate2·shard4·ep1", {"mesh.ep": "2", "mesh.shard": "2", "mesh.replicate": "1"}, "replicate1·shard2·ep2"),
    ],
)
def test_what_is_not_named_follows_the_number_of_ranks(session, before, values, after) -> None:
    degrees = dict(re.findall(r"(\D+?)(\d+)(?:·|$)", before))
    mesh = Mesh(**{name: int(degree) for name, degree in degrees.items()})
    strategy = session.plan.decision.strategy.model_copy(update={"mesh": mesh})
    decision = session.plan.decision.model_copy(update={"strategy": strategy})
    plan = session.plan.model_copy(update={"decision": decision})
    assert completed(plan, values).mesh.text() == after


@pytest.mark.parametrize(
    ("before", "values", "after"),
    [
        (("none", 1), {"overlap_chunks": "4"}, ("chunked", 4)),
        (("chunked", 4), {"overlap_chunks": "1"}, ("none", 1)),
        (("shared", 1), {"overlap_chunks": "4"}, ("shared", 4)),
        (("shared", 4), {"overlap_chunks": "1"}, ("shared", 1)),
        (("shared", 4), {"overlap": "chunked"}, ("chunked", 2)),
        (("chunked", 4), {"overlap": "shared"}, ("shared", 1)),
        (("none", 1), {"overlap": "shared", "overlap_chunks": "8"}, ("shared", 8)),
    ],
)
def test_overlap_and_its_chunks_follow_each_other(before, values, after) -> None:
    strategy = ParallelStrategy(mesh=Mesh(), overlap=before[0], overlap_chunks=before[1])
    found = edited(strategy, values)
    assert (found.overlap, found.overlap_chunks) == after


def test_a_rejection_survives_a_later_edit(session) -> None:
    before = session.plan.evidence.cost.time.step_ms
    session.reject("norm.good", "not trusted yet")
    assert session.plan.evidence.cost.time.step_ms == before + 1
    session.edit({"micro_batch_sequences": "2"}, "fill the device")
    (fusion,) = session.plan.decision.fusions
    assert fusion.rejected and fusion.provider == "eager" and fusion.source_sha256 is None
    assert fusion.reason == "not trusted yet"
    with pytest.raises(UsageError, match="already-rejected"):
        session.reject("norm.good", "again")


@pytest.mark.parametrize(
    ("values", "error", "code"),
    [
        ({"mesh.ep": "4"}, LegalityError, "legality/illegal-strategy"),
        (
            {"mesh.shard": "1", "mesh.ep": "2", "micro_batch_sequences": "2"},
            InfeasibleError,
            "infeasible/out-of-memory",
        ),
        ({"mesh.eq": "2"}, UsageError, "usage/unknown-axis"),
        ({"mesh": "2"}, UsageError, "usage/unknown-axis"),
        ({"shard": "2"}, UsageError, "usage/unknown-axis"),
        ({"mesh.shard": "two"}, UsageError, "usage/bad-value"),
        ({"mesh.shard": "0"}, UsageError, "usage/bad-value"),
        ({"mesh.shard": "2"}, UsageError, "usage/no-change"),
    ],
)
def test_an_edit_that_cannot_run_is_refused_and_nothing_is_written(session, values, error, code) -> None:
    before = session.file.read_bytes()
    with pytest.raises(error) as caught:
        session.edit(values, "because")
    assert caught.value.code == code
    assert session.file.read_bytes() == before and not (session.file.parent / "plans").exists()


def test_every_change_needs_a_reason(session) -> None:
    for change in (
        lambda: edit_axes(STAGES, session.plan, {"mesh.ep": "2"}, reason=" ", actor="a"),
        lambda: reject_proposal(STAGES, session.plan, "norm.good", reason="", actor="a"),
    ):
        with pytest.raises(UsageError, match="no-reason"):
            change()
    with pytest.raises(ApprovalError, match="no-reason"):
        session.reject_plan("")


def test_an_approval_does_not_carry_over_to_a_child(session) -> None:
    session.approve()
    assert session.status()[1] == ExitCode.OK
    session.reject("norm.good", "second thoughts")
    assert session.status()[1] == ExitCode.NEEDS_APPROVAL
    with pytest.raises(ApprovalError, match="needs-approval"):
        find_approval(session.log, session.plan)


def test_an_approval_decides_every_proposal(session) -> None:
    session.approve("looks right")
    (approval,) = read_log(session.log)
    assert [v.proposal_id for v in approval.proposals] == ["norm.good"] and approval.actor == "ada"


def test_the_slower_of_two_reviewers_is_told(session) -> None:
    slower = ReviewSession.open(session.file, actor="bob", stages=STAGES)
    session.reject("norm.good", "not trusted yet")
    for act in (lambda: slower.approve(), lambda: slower.reject("norm.good", "me too")):
        with pytest.raises(ApprovalError) as caught:
            act()
        assert caught.value.code == "approval/changed-meanwhile"


def test_a_tampered_log_is_refused(session) -> None:
    session.approve()
    session.log.write_bytes(session.log.read_bytes().replace(b'"ada"', b'"eve"'))
    with pytest.raises(ApprovalError, match="tampered"):
        session.status()


def test_a_hand_edited_plan_cannot_be_opened(session) -> None:
    session.file.write_text(session.file.read_text().replace('"ep": 1', '"ep": 2', 1))
    with pytest.raises(PlanError, match="edited"):
        ReviewSession.open(session.file, stages=STAGES)


def test_the_terminal_review_obeys_words(session) -> None:
    shown: list[str] = []
    answers = iter(
        [
            "",
            "nonsense",
            "edit mesh.ep=4 why not",
            "edit mesh.shard=1,mesh.ep=2 fewer gathers",
            "reject norm.good not trusted yet",
            "explain norm.good",
            "approve fine",
        ]
    )
    ask_until_decided(session, ask=lambda prompt: next(answers), say=shown.append)
    text = "\n".join(shown)
    assert "legality/illegal-strategy" in text and "mesh-covers-world" in text
    assert "0 of 5 nodes are random" in text and "rejected: not trusted yet" in text
    assert session.plan.decision.strategy.mesh.ep == 2
    assert session.status()[1] == ExitCode.OK


def test_the_terminal_review_asks_for_a_reason_in_its_own_words(session) -> None:
    shown: list[str] = []
    answers = iter(["reject norm.good", "edit mesh.ep=2", "quit"])
    before = session.plan.hashes
    ask_until_decided(session, ask=lambda prompt: next(answers), say=shown.append)
    assert shown[-2:] == [
        "why? write the reason in the same line: reject PROPOSAL REASON",
        "why? write the reason in the same line: edit AXIS=VALUE REASON",
    ]
    assert load_plan(session.file).hashes == before


def test_the_terminal_review_can_be_left(session) -> None:
    def ask(prompt: str) -> str:
        raise EOFError

    ask_until_decided(session, ask=ask, say=lambda text: None)
    assert session.status()[1] == ExitCode.NEEDS_APPROVAL


def test_the_terminal_shows_what_a_reviewer_needs(session) -> None:
    text = plan_text(session.plan, width=150)
    for needed in (
        session.plan.hashes.decision,
        "replicate1·shard2·ep1",
        "norm.good",
        "✓ 1 of 1",
        "norm.unproved",
        "✗ 0 of 1: refused",
        "as fast, with 2.00 GiB more memory",
        "frozen_base",
        "Memory peaks while weights are loaded",
    ):
        assert needed in text, needed
    assert max(map(len, plan_text(session.plan, width=90).splitlines())) <= 90


def test_the_difference_of_parent_and_child(session) -> None:
    parent = session.plan
    session.edit({"mesh.shard": "1", "mesh.ep": "2"}, "fewer gathers")
    found = {(d.section, d.field): (d.left, d.right) for d in differences(parent, session.plan)}
    assert found["decision", "strategy.mesh.ep"] == ("1", "2")
    assert found["decision", "parent_hash"][0] == "None"
    assert found["evidence", "cost.memory.components.frozen_base.bytes"] == (str(2 << 30), str(4 << 30))
    assert differences(parent, parent) == ()


def test_an_entry_that_one_plan_lacks_is_one_line(session) -> None:
    whole = session.plan
    first, *others = whole.evidence.proposals
    less = whole.model_copy(update={"evidence": whole.evidence.model_copy(update={"proposals": tuple(others)})})
    (only,) = [d for d in differences(whole, less) if d.field.startswith("proposals.")]
    assert (only.section, only.field) == ("evidence", f"proposals.{first.id}")
    assert (only.left, only.right) == (first.title, "(absent)")
    (back,) = [d for d in differences(less, whole) if d.field.startswith("proposals.")]
    assert (back.left, back.right) == ("(absent)", first.title)


@pytest.mark.parametrize(
    ("values", "after"),
    [
        ({"overlap": "chunked"}, {"overlap": "chunked", "overlap_chunks": 2}),
        ({"overlap_chunks": "4"}, {"overlap": "chunked", "overlap_chunks": 4}),
        ({"overlap": "chunked", "overlap_chunks": "3"}, {"overlap": "chunked", "overlap_chunks": 3}),
        ({"checkpointed_layers": "0, 2"}, {"checkpointing": "layers", "checkpointed_layers": [0, 2]}),
        ({"checkpointed_layers": ""}, {"checkpointing": "none", "checkpointed_layers": []}),
        ({"checkpointing": "full"}, {"checkpointing": "full", "checkpointed_layers": []}),
    ],
)
def test_axes_that_belong_together_follow_each_other(values, after) -> None:
    found = edited(ParallelStrategy(mesh=Mesh()), values).whole()
    assert {name: list(v) if isinstance(v := found[name], (list, tuple)) else v for name in after} == after
    back = edited(edited(ParallelStrategy(mesh=Mesh()), {"overlap": "chunked"}), {"overlap": "none"})
    assert back == ParallelStrategy(mesh=Mesh())


def test_every_axis_of_a_strategy_is_on_the_page_with_the_choices_of_its_schema() -> None:
    from shardwright.workflows.review.trial import AXES, choices, is_list

    leaves = set(ParallelStrategy(mesh=Mesh()).whole()) - {"mesh"} | {f"mesh.{name}" for name in Mesh.model_fields}
    assert set(AXES) == leaves
    assert choices("checkpointing") == ("none", "full", "layers")
    assert choices("reshard_after_forward") == ("true", "false")
    assert choices("mesh.ep") == choices("overlap_chunks") == () and is_list("checkpointed_layers")
