"""The chosen strategy beside its rivals: priced alike wherever they stand together."""

from __future__ import annotations

from pathlib import Path

import pytest
import review_plans
import workflow_fakes as fakes

from shardwright.schemas.plan import AdaptationPlan, load_plan, parse_plan
from shardwright.workflows.certifying import certify
from shardwright.workflows.edits import edit_axes, reject_proposal
from shardwright.workflows.nodes.propose import gate
from shardwright.workflows.report.html import html_plan
from shardwright.workflows.report.plan_content import as_rivals, on_front, with_fusions
from shardwright.workflows.review.session import ReviewSession
from shardwright.workflows.review.terminal import plan_text
from shardwright.workflows.review.views import page_of

PROPOSALS = tuple(map(gate, review_plans.many(2)))
"""The first runs by a kernel, the second eagerly."""


def estimate(profile, recipe, cluster, strategy, targets, fusions=()):
    """A kernel saves 3 ms and takes a GiB."""
    plain = fakes.cost(strategy)
    kernels = sum(fusion.provider != "eager" for fusion in fusions)
    time = plain.time.model_copy(update={"step_ms": plain.time.step_ms - 3 * kernels})
    memory = plain.memory.model_copy(update={"reserved_bytes": plain.memory.reserved_bytes + (kernels << 30)})
    return plain.model_copy(update={"time": time, "memory": memory})


STAGES = fakes.fake_stages(estimate=estimate)


@pytest.fixture
def plan() -> AdaptationPlan:
    bare = review_plans.plan_of(PROPOSALS)
    evidence, decision = bare.evidence, bare.decision
    joined = certify(
        STAGES, evidence.profile, decision.recipe, evidence.cluster, decision.lora_targets, PROPOSALS, decision.strategy
    )
    return AdaptationPlan.seal(
        decision.model_copy(update={"fusions": joined.fusions}),
        evidence.model_copy(update={"cost": joined.cost, "plain": joined.plain}),
    )


def test_the_chosen_one_is_compared_without_its_kernels(plan, tmp_path: Path) -> None:
    assert plan.evidence.cost.time.step_ms == 7 and as_rivals(plan) == (10, 2 << 30)
    assert parse_plan(plan.to_bytes(), where="here").evidence.plain == plan.evidence.plain
    told = "All are priced without fused operators, the chosen one too; with its own it takes 7 ms and 3 GiB."
    assert with_fusions(plan) == told

    table = plan_text(plan).split("ALTERNATIVES\n")[1].splitlines()
    assert table[0] == told
    assert table[1].split() == ["strategy", "step", "memory", "budget", "on", "the", "front"]
    assert table[2].split()[-5:] == ["ms", "2", "GiB", "fits", "yes"] and " 10 ms" in table[2]
    assert table[3].strip() == "the plan's own" and " 12 ms" in table[4]
    assert told in html_plan(plan)

    plan.save(tmp_path / "plan.json")
    page = page_of(ReviewSession.open(tmp_path / "plan.json", actor="ada", stages=STAGES), None, "", "2026-01-31")
    assert "chosen 0: replicate1·shard2" in page.front and ", 10 ms, 2 GiB" in page.front and "7 ms" not in page.front
    assert page.chosen_priced == (10, 2 << 30) and page.with_fusions == told


def test_a_child_is_priced_anew(plan) -> None:
    child = edit_axes(STAGES, plan, {"mesh.ep": "2"}, reason="fewer gathers", actor="ada")
    assert as_rivals(child) == (10, 4 << 30) and child.evidence.cost.time.step_ms == 7
    assert on_front(plan) and not on_front(with_rival(child, step_ms=10, reserved_bytes=2 << 30))
    bare = reject_proposal(STAGES, plan, PROPOSALS[0].id, reason="not here", actor="ada")
    assert bare.evidence.plain is None and as_rivals(bare) == (bare.evidence.cost.time.step_ms, 2 << 30)
    assert with_fusions(bare) == "" and "All are priced" not in plan_text(bare)


def with_rival(plan: AdaptationPlan, **figures: int) -> AdaptationPlan:
    rival = plan.evidence.alternatives[0].model_copy(update=figures)
    return AdaptationPlan.seal(plan.decision, plan.evidence.model_copy(update={"alternatives": (rival,)}))


@pytest.mark.parametrize("checkpointing", ["none", "full", "layers"])
def test_the_page_warms_up_whatever_is_recomputed(plan, tmp_path: Path, checkpointing: str) -> None:
    """What it tries beforehand must differ from the plan, or the first edit waits for seconds of imports."""
    pytest.importorskip("fastapi", reason="the review page needs the extra `review`")
    from shardwright.workflows.review.app import ReviewServer
    from shardwright.workflows.review.guard import Guard
    from shardwright.workflows.review.serve import _warm

    layers = (0,) if checkpointing == "layers" else ()
    strategy = plan.decision.strategy.model_copy(update={"checkpointing": checkpointing, "checkpointed_layers": layers})
    path = tmp_path / "plan.json"
    AdaptationPlan.seal(plan.decision.model_copy(update={"strategy": strategy}), plan.evidence).save(path)
    assert load_plan(path).decision.strategy.checkpointing == checkpointing
    server = ReviewServer(ReviewSession.open(path, actor="ada", stages=STAGES), Guard(8125))
    tried = []
    server.trial = tried.append
    server.ready.clear()
    _warm(server)
    assert server.ready.is_set() and tried[0]["checkpointing"] != checkpointing
