"""Policy evaluation: pure, closed, each rule decides by itself."""

from __future__ import annotations

import pytest
import workflow_fakes as fakes
from hypothesis import given
from hypothesis import strategies as st

from shardwright.schemas.canonical import canonical_bytes
from shardwright.schemas.errors import UsageError
from shardwright.schemas.plan import AdaptationPlan
from shardwright.schemas.policy import Policy
from shardwright.workflows.policy import evaluate, load_policy


@pytest.fixture
def plan(finished) -> AdaptationPlan:
    return finished.plan


def broken(plan: AdaptationPlan, policy: Policy) -> list[str]:
    return [finding.rule for finding in evaluate(plan, policy).violations]


def test_same_plan_and_policy_give_the_same_bytes(plan) -> None:
    policy = Policy(approve=True)
    assert canonical_bytes(evaluate(plan, policy)) == canonical_bytes(evaluate(plan, policy))


def test_memory_limit_is_inclusive(plan) -> None:
    fraction = plan.evidence.cost.memory.fraction
    assert fraction == pytest.approx(2 / 6)  # 2 GiB of 6 GiB
    assert broken(plan, Policy(max_memory_fraction=fraction)) == []
    assert broken(plan, Policy(max_memory_fraction=fraction * 0.999)) == ["max_memory_fraction"]


def test_a_provider_outside_the_list_is_named(plan) -> None:
    result = evaluate(plan, Policy(allow_providers=("eager",), approve=True))
    (finding,) = result.violations
    assert finding.rule == "allow_providers" and "not allowed: shardwright" in finding.found
    assert not result.approves


def test_obligations_must_be_listed_as_proved(plan) -> None:
    assert broken(plan, Policy(require_obligations=("no-randomness",))) == []
    assert broken(plan, Policy(require_obligations=("re-trace",))) == ["require_obligations/re-trace"]


def test_approve_false_never_approves(plan) -> None:
    result = evaluate(plan, Policy(approve=False))
    assert not result.violations and not result.approves


@given(limit=st.floats(0.01, 1), providers=st.sets(st.sampled_from(["eager", "shardwright", "compile"])))
def test_it_approves_exactly_when_nothing_is_broken(limit: float, providers: set[str]) -> None:
    plan = _PLAN()
    policy = Policy(max_memory_fraction=limit, allow_providers=tuple(sorted(providers)), approve=True)
    assert evaluate(plan, policy).approves == (limit >= 1 / 3 and "shardwright" in providers)


def _PLAN() -> AdaptationPlan:
    from shardwright.schemas.plan import DataPin
    from shardwright.schemas.recipe import DataSpec, Recipe
    from shardwright.workflows.nodes.propose import gate
    from shardwright.workflows.planning import Inputs, assemble, join

    recipe = Recipe(data=DataSpec(train="a", held_out="b"))
    found, cluster, structure = fakes.searched(), fakes.cluster_spec(), fakes.structured()
    stages, proposals = fakes.fake_stages(), tuple(map(gate, structure.proposals))
    joined = join(stages, fakes.profile(), recipe, cluster, (fakes.target(),), proposals, found.best)
    pins = DataPin(train_sha256=fakes.H, held_out_sha256=fakes.H)
    inputs = Inputs(
        fakes.profile(), recipe, cluster, fakes.cluster_ref(cluster), (fakes.target(),), pins, structure.graph
    )
    return assemble(inputs, joined, found.alternatives, found.record, found.explanation)


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("max_memory_fractoin: 0.5\n", "usage/invalid", "max_memory_fractoin: unknown key"),
        ("max_memory_fraction: 1.5\n", "usage/invalid", "max_memory_fraction"),
        ("require_obligations: [no-such]\n", "usage/invalid", "require_obligations"),
        ("- a\n", "usage/invalid", "mapping"),
        ("a: [\n", "usage/unreadable", "YAML"),
    ],
)
def test_a_wrong_policy_file_is_explained(tmp_path, text, code, named) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_policy(path)
    assert caught.value.code == code and named in caught.value.what


def test_the_shipped_policies_load(request) -> None:
    examples = request.config.rootpath / "examples"
    paths = sorted(examples.glob("*/policy.yaml"))
    assert paths and all(load_policy(path).approve for path in paths)
