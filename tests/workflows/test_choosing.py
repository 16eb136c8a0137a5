"""The join chooses the fastest strategy as run: the search's best and its rivals, each with its own fused operators."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import review_plans
import workflow_fakes as fakes

from shardwright.agents.strategy.run import SearchResult, run_search
from shardwright.agents.structure.run import run_structure
from shardwright.checkpoints.profile import profile_checkpoint
from shardwright.schemas.errors import InfeasibleError
from shardwright.schemas.plan import AdaptationPlan, parse_plan
from shardwright.schemas.recipe import BatchSpec, DataSpec, LoraSpec, PrecisionSpec, Recipe
from shardwright.schemas.strategy import Mesh, ParallelStrategy
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import evaluate, workload
from shardwright.search_spaces.space import enumerate_plans
from shardwright.workflows.choosing import MOST, Chosen, choose
from shardwright.workflows.drive import drive
from shardwright.workflows.edits import choose_variant, edit_axes, reject_proposal
from shardwright.workflows.nodes.propose import gate
from shardwright.workflows.report.html import html_plan
from shardwright.workflows.report.plan_content import as_rivals, compared_as_run, on_front
from shardwright.workflows.review.session import ReviewSession
from shardwright.workflows.review.terminal import plan_text
from shardwright.workflows.review.views import page_of
from shardwright.workflows.stages import Stages

BEST, RIVAL = fakes.searched().best, fakes.searched().alternatives[0].strategy
PUBLISHED = Path(__file__).resolve().parents[1] / "checkpoints" / "published.py"
BUDGET = 6 << 30
Figures = dict[ParallelStrategy, tuple[float, int]]


def stages_of(plain: Figures, fused: Figures, **replaced: Callable[..., object]) -> Stages:
    """Stages with these step times in ms and reserved bytes."""

    def estimate(profile, recipe, cluster, strategy, targets, fusions=()):
        kernels = any(fusion.provider != "eager" for fusion in fusions)
        step_ms, held = (fused if kernels else plain)[strategy]
        cost = fakes.cost(strategy)
        term = cost.time.components[0].model_copy(update={"milliseconds": step_ms})
        time = cost.time.model_copy(update={"step_ms": step_ms, "components": (term,)})
        memory = cost.memory.model_copy(update={"reserved_bytes": held, "peak_bytes": held})
        return cost.model_copy(update={"time": time, "memory": memory, "feasible": memory.fits})

    return fakes.fake_stages(estimate=estimate, **replaced)


PLAIN: Figures = {BEST: (10, 2 << 30), RIVAL: (12, 4 << 30)}
TURNED: Figures = {BEST: (8, 2 << 30), RIVAL: (6, 4 << 30)}


def chosen_of(stages: Stages, further: tuple[ParallelStrategy, ...] = ()) -> Chosen:
    found = fakes.searched()
    stages = replace(stages, search_fused=partial(stages.search_fused, more=further))
    inputs = SimpleNamespace(
        profile=fakes.profile(), recipe=None, cluster=fakes.cluster_spec(), targets=(fakes.target(),)
    )
    proposals = tuple(map(gate, review_plans.many(2)))
    rivals = found.alternatives
    return choose(stages, inputs, proposals, found.best, rivals, found.record, found.explanation)


@pytest.fixture
def plan_by(tmp_path: Path, request_of) -> Callable[..., AdaptationPlan]:
    def make(stages: Stages, name: str = "run") -> AdaptationPlan:
        drive(request_of("plan"), tmp_path / name, stages=stages)
        return parse_plan((tmp_path / name / "plan.json").read_bytes(), where=name)

    return make


def test_a_rival_that_fused_operators_make_faster_is_chosen(plan_by, tmp_path: Path) -> None:
    stages = stages_of(PLAIN, TURNED)
    plan = plan_by(stages)
    evidence = plan.evidence
    assert plan.decision.strategy == RIVAL and any(f.provider == "shardwright" for f in plan.decision.fusions)
    assert evidence.cost.time.step_ms == 6 and evidence.plain is not None
    assert (evidence.plain.step_ms, evidence.plain.reserved_bytes) == (12, 4 << 30)
    (lost,) = evidence.alternatives
    assert (lost.strategy, lost.step_ms, lost.fused_step_ms) == (BEST, 10, 8)
    assert (lost.reserved_bytes, lost.fused_reserved_bytes) == (2 << 30, 2 << 30)
    assert lost.feasible and lost.pareto and on_front(plan), "slower and leaner, as run"
    assert lost.lost_because == "33.3% slower (2 ms): 2 ms more for gemm"
    story = " ".join(evidence.explanation)
    assert "priced twice. Without fused operators 2 fit, the best takes 10 ms" in story
    assert "each with those certified for it 2 fit" in story
    assert f"without them {BEST.text()} is the best, 10 ms a step beside 12 ms" in story
    assert f"with its own it takes 8 ms, and {RIVAL.text()} with its own 6 ms, 25.0% less." in story
    assert f"{RIVAL.text()} on 2 × CPU" in story and "A step takes 6 ms" in story

    assert compared_as_run(plan) and as_rivals(plan) == (6, 4 << 30)
    lines = plan_text(plan, width=150).split("ALTERNATIVES\n")[1].splitlines()
    assert lines[1].split()[:4] == ["strategy", "step", "unfused", "memory"]
    assert "6 ms    12 ms   4 GiB" in lines[2] and "8 ms    10 ms   2 GiB" in lines[4]
    assert "unfused" in html_plan(plan)
    plan.save(tmp_path / "plan.json")
    page = page_of(ReviewSession.open(tmp_path / "plan.json", actor="ada", stages=stages), None, "", "2026-01-31")
    assert page.both and page.unfused_ms == 12 and page.rivals == ((lost, 8, 2 << 30),)
    assert page.chosen_priced == (6, 4 << 30) and ", 8 ms, 2 GiB" in page.front


def test_the_same_inputs_give_the_same_plan(plan_by) -> None:
    one, other = (plan_by(stages_of(PLAIN, TURNED), name) for name in ("one", "other"))
    assert one.to_bytes() == other.to_bytes()


def test_a_reviewer_s_strategy_is_not_chosen_again(plan_by) -> None:
    stages = stages_of(PLAIN, TURNED)
    plan = plan_by(stages)
    child = edit_axes(stages, plan, {"mesh.ep": "1", "mesh.shard": "2"}, reason="leaner", actor="ada")
    assert child.decision.strategy == BEST and child.evidence.cost.time.step_ms == 8
    assert child.evidence.alternatives == plan.evidence.alternatives and compared_as_run(child)


def test_a_rejected_fusion_is_beside_rivals_without_any(plan_by) -> None:
    stages = stages_of(PLAIN, TURNED)
    plan = plan_by(stages)
    fused = next(f for f in plan.decision.fusions if f.provider != "eager")
    child = reject_proposal(stages, plan, fused.proposal_id, reason="not here", actor="ada")
    assert not compared_as_run(child) and as_rivals(child) == (12, 4 << 30)
    assert not on_front(child), "without fused operators the rival is faster and leaner"


@pytest.mark.parametrize(
    ("fused", "winner", "told"),
    [
        ({BEST: (8, 2 << 30), RIVAL: (8, 2 << 30)}, BEST, ""),
        ({BEST: (8, 2 << 30), RIVAL: (8, 1 << 30)}, RIVAL, "it reserves 1.00 GiB more than"),
        ({BEST: (8, 2 << 30), RIVAL: (6, BUDGET + 1)}, BEST, ""),
        ({BEST: (8, 2 << 30), RIVAL: (6, BUDGET - 1)}, BEST, ""),
        ({BEST: (8, BUDGET - 1), RIVAL: (9, 4 << 30)}, RIVAL, "beyond the safety margin of 95%"),
        ({BEST: (8, BUDGET + 1), RIVAL: (9, 4 << 30)}, RIVAL, "it needs 6.00 GiB a rank and 6.00 GiB are usable"),
    ],
    ids=["tie", "leaner", "does-not-fit", "no-margin", "best-without-margin", "best-does-not-fit"],
)
def test_the_search_s_rule_decides(fused: Figures, winner: ParallelStrategy, told: str) -> None:
    found = chosen_of(stages_of(PLAIN, fused))
    assert found.joined.strategy == winner and found.joined.cost.feasible
    changed = [line for line in found.explanation if line.startswith("Fused operators changed the choice")]
    assert len(changed) == (winner == RIVAL) and all(told in line for line in changed)
    (lost,) = found.alternatives
    assert lost.feasible == (lost.fused_reserved_bytes <= BUDGET)
    assert ("does not fit" in lost.lost_because) == (not lost.feasible)


def test_nothing_that_fits_names_the_leanest() -> None:
    stages = stages_of(PLAIN, {BEST: (8, BUDGET + 2), RIVAL: (6, BUDGET + 1)})
    with pytest.raises(InfeasibleError, match="out-of-memory") as caught:
        chosen_of(stages)
    assert caught.value.where == RIVAL.text()


ONLY_FUSED = ParallelStrategy(mesh=Mesh(shard=2), accumulation_steps=1, micro_batch_sequences=2)
OVER = PLAIN | {ONLY_FUSED: (9, BUDGET + 1)}


def test_one_that_fits_only_fused_is_chosen_and_says_with_which() -> None:
    found = chosen_of(stages_of(OVER, TURNED | {ONLY_FUSED: (1, 1 << 30)}), (ONLY_FUSED,))
    assert found.joined.strategy == ONLY_FUSED and found.joined.cost.feasible and not found.joined.eager.feasible
    assert found.explanation[0] == (
        "This strategy fits only with fusions: rms_norm. Without fused operators it needs 6 GiB a rank and 6 GiB are "
        "usable; a plan without it is refused."
    )
    assert {one.strategy for one in found.alternatives} == {BEST, RIVAL}


def test_where_the_search_s_best_fits_only_fused_nothing_is_said_of_a_changed_choice() -> None:
    stages = stages_of({BEST: (10, BUDGET + 1), RIVAL: (12, BUDGET + 1)}, TURNED)
    found = chosen_of(stages)
    assert found.joined.strategy == RIVAL and found.explanation[0].startswith("This strategy fits only with fusions")
    assert not any("changed the choice" in line for line in found.explanation)


def test_a_fusion_that_the_plan_needs_is_not_turned_off(plan_by) -> None:
    stages = stages_of(PLAIN | {RIVAL: (12, BUDGET + 1)}, TURNED)
    plan = plan_by(stages)
    assert plan.decision.strategy == RIVAL and plan.evidence.plain.reserved_bytes > BUDGET
    said = "fits only with fusions: rms_norm"
    assert said in " ".join(plan.evidence.explanation) and said in html_plan(plan)
    fused = next(f for f in plan.decision.fusions if f.provider != "eager")
    with pytest.raises(InfeasibleError) as caught:
        reject_proposal(stages, plan, fused.proposal_id, reason="not here", actor="ada")
    error = caught.value
    assert error.code == "infeasible/fusion-needed" and error.exit_code == 7
    assert f"turned off: {fused.proposal_id}" in error.what and "keep the fusion" in error.next_action
    with pytest.raises(InfeasibleError) as caught:
        choose_variant(stages, plan, fused.proposal_id, "eager", reason="not here", actor="ada")
    assert caught.value.code == "infeasible/fusion-needed"
    leaner = edit_axes(stages, plan, {"mesh.ep": "1", "mesh.shard": "2"}, reason="leaner", actor="ada")
    child = reject_proposal(stages, leaner, fused.proposal_id, reason="not here", actor="ada")
    assert child.decision.strategy == BEST and child.evidence.plain is None


def test_a_further_mesh_can_win_and_the_search_s_best_is_kept_beside() -> None:
    further = tuple(ParallelStrategy(mesh=Mesh(shard=2), prefetch_depth=depth) for depth in range(2, 9))
    plain = PLAIN | {one: (11, 2 << 30) for one in further}
    fused = TURNED | {one: (4 + place, 2 << 30) for place, one in enumerate(further)}
    found = chosen_of(stages_of(plain, fused | {BEST: (20, 2 << 30)}), further)
    assert found.joined.strategy == further[0] and len(found.alternatives) == 8
    assert found.alternatives[-1].strategy == BEST and found.alternatives[0].strategy == further[1]
    assert all(one.fused_step_ms is not None and one.lost_because for one in found.alternatives)


def test_without_fused_operators_the_search_stands() -> None:
    """Regions of a CPU cluster stay eager."""

    def eager(proposals, strategy, cluster, recipe):
        kept, decisions = fakes.recertify(proposals, strategy, cluster, recipe)
        return kept, tuple(one.model_copy(update={"provider": "eager"}) for one in decisions)

    found = chosen_of(stages_of(PLAIN, {}, recertify=eager))
    assert found.joined.strategy == BEST and found.joined.plain is None
    assert found.alternatives == fakes.searched().alternatives and found.explanation == fakes.searched().explanation


def test_the_work_is_bounded() -> None:
    further = tuple(
        ParallelStrategy(mesh=Mesh(shard=2), prefetch_depth=depth, accumulation_steps=steps)
        for depth in range(1, 9)
        for steps in (3, 4, 5)
    )
    calls = []

    def counted(profile, recipe, cluster, strategy):
        calls.append(strategy)
        return fakes.violations(profile, recipe, cluster, strategy)

    every = {one: (30.0, 2 << 30) for one in further}
    chosen_of(stages_of(PLAIN | every, TURNED | every, violations=counted), further)
    assert calls == [BEST, *further[: MOST - 1]] and len(calls) == MOST


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_layouts", PUBLISHED)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_published_layout_on_eight_gpus(published: ModuleType, tmp_path: Path) -> None:
    """Qwen3-30B-A3B's headers: whatever is chosen, no fitting rival that was priced is faster as run."""
    published.write(tmp_path / "checkpoint", published.qwen3_moe(48, 2048, 32, 4, 768))
    profile, cluster, stages = profile_checkpoint(tmp_path / "checkpoint"), load_cluster("h200-8"), Stages()
    recipe = Recipe(
        name="qwen",
        data=DataSpec(train="a", held_out="b"),
        batch=BatchSpec(sequence_tokens=4096, global_batch_sequences=256),
        lora=LoraSpec(targets=("attention", "experts"), rank=16, alpha="32"),
        precision=PrecisionSpec(base="bfloat16"),
    )
    targets = stages.targets(tmp_path / "checkpoint", recipe.lora)
    proposals = tuple(map(gate, run_structure(tmp_path / "checkpoint", profile, cluster, recipe).proposals))
    found: SearchResult = run_search(
        profile, recipe, cluster, targets, trials=1, seed=0, journal=tmp_path / "study.journal"
    )
    inputs = SimpleNamespace(profile=profile, recipe=recipe, cluster=cluster, targets=targets)

    def chosen() -> Chosen:
        rest = (found.alternatives, found.record, found.explanation)
        return choose(stages, inputs, proposals, found.best, *rest)

    one = chosen()
    assert one == chosen()
    space = SearchContext(profile, recipe, cluster)
    table, work = enumerate_plans(space), workload(profile, recipe, targets)
    fastest, fitting = float("inf"), 0
    for ep in (1, 2, 4, 8):
        _, fusions = stages.recertify(proposals, ParallelStrategy(mesh=Mesh(ep=ep)), cluster, recipe)
        plans = table.plans.take((table.plans.ep == ep) & (table.plans.cp == 1))
        costs = evaluate(work, cluster, plans, fusions)
        within = costs.reserved <= 0.95 * cluster.device.usable_memory_bytes
        fastest, fitting = min(fastest, float(costs.step_ms[within].min())), fitting + int(costs.feasible.sum())
    assert one.joined.cost.time.step_ms <= fastest, "no strategy of the scan is faster as run"
    assert one.record.fused_feasible_strategies >= fitting > found.record.feasible_strategies
    for position in range(0, len(table), len(table) // 12):
        strategy = table.strategy(position)
        alike = ParallelStrategy(mesh=Mesh(ep=strategy.mesh.ep, cp=strategy.mesh.cp), base_format=strategy.base_format)
        own, shared = (stages.recertify(proposals, plan, cluster, recipe)[1] for plan in (strategy, alike))
        assert own == shared, "ep, tp, cp and base format are all that a decision looks at"
    for rival in one.alternatives:
        if rival.feasible and rival.fused_reserved_bytes <= 0.95 * cluster.device.usable_memory_bytes:
            assert rival.fused_step_ms >= one.joined.cost.time.step_ms
    moved = one.joined.strategy != found.best
    assert any("changed the choice" in line for line in one.explanation) == moved
