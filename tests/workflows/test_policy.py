"""Policy evaluation: pure, closed, each rule decides by itself."""

from __future__ import annotations

import pytest
import workflow_fakes as fakes
from hypothesis import given, settings
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


@settings(deadline=None)
@given(limit=st.floats(0.01, 1), providers=st.sets(st.sampled_from(["eager", "shardwright", "compile"])))
def test_it_approves_exactly_when_nothing_is_broken(limit: float, providers: set[str]) -> None:
    plan = _PLAN()
    policy = Policy(max_memory_fraction=limit, allow_providers=tuple(sorted(providers)), approve=True)
    assert evaluate(plan, policy).approves == (limit >= 1 / 3 and "shardwright" in providers)


def _PLAN() -> AdaptationPlan:
    from shardwright.schemas.plan import DataPin
    from shardwright.schemas.recipe import DataSpec, Recipe
    from shardwright.workflows.certifying import certify
    from shardwright.workflows.nodes.propose import gate
    from shardwright.workflows.planning import Inputs, assemble

    recipe = Recipe(data=DataSpec(train="a", held_out="b"))
    found, cluster, structure = fakes.searched(), fakes.cluster_spec(), fakes.structured()
    stages, proposals = fakes.fake_stages(), tuple(map(gate, structure.proposals))
    joined = certify(stages, fakes.profile(), recipe, cluster, (fakes.target(),), proposals, found.best)
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


TODAY = "2026-06-01"


def finding(plan: AdaptationPlan, rule: str, **fields: object):
    result = evaluate(plan, Policy.model_validate({"approve": True, **fields}), TODAY)
    return next(f for f in result.findings if f.rule == rule), result


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        ("max_step_ms", {"max_step_ms": 10}, {"max_step_ms": 9.99}),  # the fake step is 10 ms
        ("max_gpu_hours", {"max_gpu_hours": 0.1}, {"max_gpu_hours": 0.099}),  # 0.1
        ("min_speedup", {"min_speedup": 2}, {"min_speedup": 2.01}),  # ×2
        ("allow_kernels", {"allow_kernels": ["rms_norm"]}, {"allow_kernels": ["swiglu"]}),
        ("allow_dtypes", {"allow_dtypes": ["bfloat16", "float32"]}, {"allow_dtypes": ["bfloat16"]}),
        ("allow_axes/ep", {"allow_axes": {"ep": [1, 2]}}, {"allow_axes": {"ep": [2, 4]}}),
        (
            "allow_axes/checkpointing",
            {"allow_axes": {"checkpointing": ["none"]}},
            {"allow_axes": {"checkpointing": ["full"]}},
        ),
        (
            "allow_axes/reshard_after_forward",
            {"allow_axes": {"reshard_after_forward": [True]}},
            {"allow_axes": {"reshard_after_forward": [1]}},
        ),
        ("require_measured/gains", None, {"require_measured": ["gains"]}),  # modelled
        ("require_measured/memory", None, {"require_measured": ["memory"]}),
        ("require_measured/time", None, {"require_measured": ["time"]}),
        ("allow_licences", None, {"allow_licences": ["apache-2.0"]}),  # the fake states none
        ("allow_remote_code", {}, None),  # transformers builds it
    ],
)
def test_each_rule_passes_and_denies_by_itself(plan, rule, right, wrong) -> None:
    if right is not None:
        found, result = finding(plan, rule, **right)
        assert found.passed and result.approves
    if wrong is not None:
        found, result = finding(plan, rule, **wrong)
        assert found.denies and not result.approves and [f.rule for f in result.violations] == [rule]


def test_licence_and_remote_code_are_read_from_the_profile(plan) -> None:
    profile = plan.evidence.profile.model_copy(update={"licence": "apache-2.0", "transformers_class": False})
    other = AdaptationPlan.seal(plan.decision, plan.evidence.model_copy(update={"profile": profile}))
    assert finding(other, "allow_licences", allow_licences=["apache-2.0"])[0].passed
    found, result = finding(other, "allow_remote_code")
    assert found.denies and not result.approves, "a policy that says nothing of foreign code does not approve it"
    assert finding(other, "max_memory_fraction", allow_remote_code=True)[1].approves


def test_an_axis_that_does_not_exist_denies(plan) -> None:
    assert finding(plan, "allow_axes/eq", allow_axes={"eq": [1]})[0].denies


def test_a_warning_does_not_stand_in_the_way(plan) -> None:
    found, result = finding(plan, "max_step_ms", max_step_ms=1, warn=["max_step_ms"])
    assert not found.passed and found.severity == "warn" and result.approves and result.warnings == (found,)


def test_a_waiver_holds_until_its_last_day(plan) -> None:
    waiver = {"rule": "max_step_ms", "owner": "ada", "reason": "new cluster", "until": TODAY}
    found, result = finding(plan, "max_step_ms", max_step_ms=1, waivers=[waiver])
    assert result.approves and "waived by ada until 2026-06-01: new cluster" in found.waived
    late, result = finding(plan, "max_step_ms", max_step_ms=1, waivers=[{**waiver, "until": "2026-05-31"}])
    assert not result.approves and "waiver of ada ended on 2026-05-31" in late.found
    other, result = finding(plan, "max_step_ms", max_step_ms=1, waivers=[{**waiver, "rule": "max_gpu_hours"}])
    assert other.denies
    one = {**waiver, "rule": "require_measured/time"}
    both = {"require_measured": ["time", "memory"], "waivers": [one]}
    assert [f.rule for f in finding(plan, "require_measured/time", **both)[1].violations] == ["require_measured/memory"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("warn: [max_stepms]\n", "no rule 'max_stepms'"),
        ("waivers: [{rule: max_step_ms, owner: '', until: '2026-01-01', reason: x}]\n", "owner"),
        ("waivers: [{rule: max_step_ms, owner: a, until: soon, reason: x}]\n", "2026-12-31"),
        ("waivers: [{rule: max_step_ms, owner: a, until: '2026-01-01', reason: x, reasn: y}]\n", "reasn: unknown key"),
        ("allow_axes: {ep: []}\n", "has no value"),
        ("min_speedup: 0.5\n", "min_speedup"),
    ],
)
def test_a_typo_in_a_rule_is_said(tmp_path, text, named) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_policy(path)
    assert named in caught.value.what


def test_the_policy_command_runs_a_policy_against_saved_plans(cli, plan, tmp_path) -> None:
    plan.save(tmp_path / "good.json")
    (tmp_path / "policy.yaml").write_text("max_step_ms: 10\napprove: true\n")
    done = cli("policy", "test", tmp_path / "policy.yaml", tmp_path / "good.json")
    assert done.code == 0 and "approves" in done.out and "max_step_ms" in done.out
    (tmp_path / "strict.yaml").write_text("max_step_ms: 9\napprove: true\n")
    done = cli("policy", "test", tmp_path / "strict.yaml", tmp_path / "good.json", "--output", "json")
    assert done.code == 4 and '"max_step_ms"' in done.out
    assert cli("policy", "test", tmp_path / "strict.yaml", tmp_path / "good.json", "--expect", "deny").code == 0
    assert cli("policy", "test", tmp_path / "policy.yaml", tmp_path / "good.json", "--expect", "deny").code == 1
    sarif = cli("policy", "test", tmp_path / "strict.yaml", tmp_path / "good.json", "--output", "sarif")
    assert sarif.code == 4 and '"ruleId": "policy/max_step_ms"' in sarif.out
    (tmp_path / "typo.yaml").write_text("max_stepms: 9\n")
    assert cli("policy", "test", tmp_path / "typo.yaml", tmp_path / "good.json").code == 2


def test_a_rules_name_stands_for_all_its_findings(plan) -> None:
    """``allow_axes`` in ``warn`` covers ``allow_axes/ep``; the whole name of one finding covers that one alone."""
    axes = {"ep": [4], "checkpointing": ["full"]}
    found, result = finding(plan, "allow_axes/ep", allow_axes=axes, warn=["allow_axes"])
    assert found.severity == "warn" and result.approves and len(result.warnings) == 2
    found, result = finding(plan, "allow_axes/ep", allow_axes=axes, warn=["allow_axes/ep"])
    assert found.severity == "warn" and [one.rule for one in result.violations] == ["allow_axes/checkpointing"]


def test_findings_say_what_was_found_and_what_is_allowed(plan) -> None:
    def said(rule: str, **fields: object) -> tuple[str, str]:
        found, _ = finding(plan, rule, **fields)
        return found.found, found.allowed

    assert said("min_speedup", min_speedup=2) == ("all 1 installed fusions reach it", "≥ ×2 each")
    assert said("min_speedup", min_speedup=3)[0].endswith("×2")
    assert said("allow_kernels", allow_kernels=["swiglu"]) == ("rms_norm (not allowed: rms_norm)", "swiglu")
    assert said("allow_kernels", allow_kernels=[]) == ("rms_norm (not allowed: rms_norm)", "none")
    assert said("allow_axes/ep", allow_axes={"ep": [1, 2]})[1] == "1, 2"
