"""The strategy agent's model: it prices and enqueues; legality, costs and the search's best do not depend on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.agents.llm.scripted import in_turn, message
from shardwright.agents.llm.strategy_advisor import StrategyAdvisor
from shardwright.agents.strategy.pricing import Pricer
from shardwright.search_spaces.context import SearchContext
from shardwright.search_spaces.cost import workload
from shardwright.search_spaces.legality import violations_in

BUILDERS = Path(__file__).resolve().parents[2] / "search_spaces" / "conftest.py"
PLAN = {
    "replicate": 1,
    "shard": 1,
    "ep": 8,
    "tp": 1,
    "cp": 1,
    "pp": 1,
    "micro_batch": 1,
    "accumulation": 1,
    "checkpointing": "full",
    "reshard": True,
    "prefetch": 1,
}


@pytest.fixture(scope="module")
def build() -> SimpleNamespace:
    spec = importlib.util.spec_from_file_location("search_space_builders", BUILDERS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return SimpleNamespace(**vars(module))


@pytest.fixture
def advisor(build: SimpleNamespace) -> StrategyAdvisor:
    profile = build.qwen3_30b()
    recipe, cluster = build.recipe_of(batch=8, tokens=2048, base="bfloat16"), build.load_cluster("h200-8")
    work = workload(profile, recipe, build.targets_of(profile, rank=8), ())
    return StrategyAdvisor(SearchContext(profile, recipe, cluster, False, ()), Pricer.of(work, cluster))


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return message(calls=[(name, arguments)])


def test_a_legal_plan_is_priced_explained_and_enqueued(advisor: StrategyAdvisor, talk: Callable[..., Any]) -> None:
    script = [
        call("show_space"),
        call("evaluate_plan", **PLAN),
        call("explain_bound", plan="plan-1"),
        call("enqueue_trial", plan="plan-1"),
        call("enqueue_trial", plan="plan-1"),
        call("finish", explanation="experts stay local"),
    ]
    chat, served = talk(in_turn(script))
    assert advisor.run(chat).why == "complete"
    (start,) = advisor.advice.starts
    assert start.mesh.ep == 8 and not violations_in(advisor.context, start)
    because = [s.because for s in advisor.advice.suggestions]
    assert because[0].startswith("legal, ") and because[1] == "enqueued already"
    results = [m["content"] for m in served.requests[-1]["messages"] if m["role"] == "tool"]
    assert '"world": 8' in results[0] and "step_ms" in results[1] and "frozen_base" in results[2]


def test_illegal_and_unknown_plans_go_nowhere(advisor: StrategyAdvisor, talk: Callable[..., Any]) -> None:
    script = [
        call("evaluate_plan", **{**PLAN, "ep": 7}),
        call("evaluate_plan", **{**PLAN, "ep": -8}),
        call("evaluate_plan", **{**PLAN, "ep": 10**30}),
        call("evaluate_plan", **{**PLAN, "ep": "8; rm -rf /"}),
        call("enqueue_trial", plan="plan-1"),
        call("narrow_axis", axis="ep", values=["4"], reason="smaller"),
        call("evaluate_plan", **PLAN),
        call("finish", explanation="none"),
    ]
    chat, served = talk(in_turn(script))
    advisor.run(chat)
    assert advisor.advice.starts == []
    results = [m["content"] for m in served.requests[-1]["messages"] if m["role"] == "tool"]
    assert '"illegal"' in results[0] and all('"error"' in one for one in results[1:5]) and "narrowed" in results[6]
    assert [s.kind for s in advisor.advice.suggestions if s.accepted] == ["narrow-axis", "explain"]
