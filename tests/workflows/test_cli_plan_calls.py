"""`kernels bench --plan`: what a plan's fusions call, listed anywhere and timed on the plan's device."""

from __future__ import annotations

from pathlib import Path

import pytest
import workflow_fakes as fakes
from test_cli_evidence import time, written

from shardwright.schemas.fusion import FusionProposal
from shardwright.schemas.ops import OperatorCall
from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.workflows.drive import Outcome
from shardwright.workflows.plan_calls import calls_of, unmeasured

DEVICE = "CPU"
NORM, WIDE = {"T": 64, "H": 64}, {"T": 60, "H": 64}
HEAD = {"T": 64, "H": 64, "V": 5}


def call(op: str, dtype: str = "float32", **sizes: int) -> OperatorCall:
    return OperatorCall(op=op, dtype=dtype, sizes=sizes, pass_name="fwd+dx")


CALLS = (call("rms_norm", **NORM), call("linear_cross_entropy", **HEAD), call("rms_norm", **WIDE))


def priced(proposal: FusionProposal, calls: tuple[OperatorCall, ...]) -> FusionProposal:
    variants = [
        v.model_copy(update={"gain": v.gain.model_copy(update={"calls": calls})}) if v.gain is not None else v
        for v in proposal.variants
    ]
    return proposal.model_copy(update={"variants": tuple(variants)})


def with_calls(plan: AdaptationPlan, calls: tuple[OperatorCall, ...]) -> AdaptationPlan:
    proposals = tuple(priced(proposal, calls) for proposal in plan.evidence.proposals)
    return AdaptationPlan.seal(plan.decision, plan.evidence.model_copy(update={"proposals": proposals}))


@pytest.fixture
def older(finished: Outcome) -> AdaptationPlan:
    """A plan with a fusion of ours, as one was written before it kept calls."""
    assert finished.plan is not None and finished.plan.evidence.cluster.device.name == DEVICE
    return finished.plan


@pytest.fixture
def plan_file(older: AdaptationPlan, tmp_path: Path) -> Path:
    with_calls(older, CALLS).save(tmp_path / "called.json")
    return tmp_path / "called.json"


def test_a_plan_without_calls_is_written_as_before_and_asks_for_another(
    cli, older: AdaptationPlan, tmp_path: Path
) -> None:
    assert b'"calls"' not in older.to_bytes() and with_calls(older, ()).hashes == older.hashes
    older.save(tmp_path / "older.json")
    for more in ((), ("--list",)):
        done = cli("kernels", "bench", "--plan", tmp_path / "older.json", *more)
        assert done.code == 5 and done.out == "" and "[plan/no-sizes]" in done.err
        assert "plan again with `shardwright plan`" in done.err.split("next:")[1]


def test_calls_are_evidence_and_no_part_of_the_decision(older: AdaptationPlan, plan_file: Path) -> None:
    loaded = load_plan(plan_file)
    assert loaded.hashes.decision == older.hashes.decision and loaded.hashes.evidence != older.hashes.evidence
    assert calls_of(loaded, where="") == CALLS[:2], "of two under one key the first"


def test_the_list_says_what_is_timed_what_has_a_time_and_what_no_suite_takes(
    cli, plan_file: Path, tmp_path: Path
) -> None:
    def rows(*more: object) -> list[list[str]]:
        done = cli("kernels", "bench", "--plan", plan_file, "--list", *more)
        assert done.code == 0, done.err
        return [line.split() for line in done.out.splitlines()]

    head, norm, loss, *said = rows()
    assert head == ["operator", "dtype", "sizes", "pass", "time"]
    assert norm == ["rms_norm", "float32", "H64,T64", "fwd+dx", "none"]
    assert loss == ["linear_cross_entropy", "float32", "H64,T64,V5", "not", "timed", "none"]
    assert said[0][0] == "[kernel/no-inputs]" and " ".join(said[1]).startswith("where: linear_cross_entropy at H64")
    mine = written(tmp_path / "mine.jsonl", time())
    assert rows("--evidence", mine)[1][-2:] == ["fwd+dx,", str(mine)]
    stale = written(tmp_path / "stale.jsonl", time(source_sha256="0" * 64))
    assert rows("--evidence", stale)[1][-1] == "none"
    assert len(rows("rms_norm")) == 2
    assert " ".join(rows("router")[0]) == f"{plan_file}: no operator of ours to time"


def test_how_many_fusions_nothing_has_measured(plan_file: Path, tmp_path: Path) -> None:
    loaded = load_plan(plan_file)
    normed = with_calls(loaded, CALLS[:1])
    mine = written(tmp_path / "mine.jsonl", time())
    assert (unmeasured(loaded, ()), unmeasured(loaded, (mine,))) == (1, 1)
    assert (unmeasured(normed, ()), unmeasured(normed, (mine,))) == (1, 0)


def test_without_a_plan_or_a_device_it_ends_at_once(cli, plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    done = cli("kernels", "bench", "--list")
    assert done.code == 2 and "usage/list-without-plan" in done.err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = cli("kernels", "bench", "--plan", plan_file)
    assert done.code == 1 and "kernel/no-device" in done.err and done.out == ""
    done = cli("kernels", "bench", "linear_cross_entropy", "--plan", plan_file)
    assert done.code == 1 and "kernel/no-case" in done.err and "--list" in done.err


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The plan's device; what was verified and timed on it."""
    import torch

    from shardwright.kernels import bench, verify_jobs
    from shardwright.schemas.bench import BenchLine

    happened: list[object] = []

    def timed(chosen, out, evidence, *, report):  # type: ignore[no-untyped-def]
        happened.append([(suite.op, case.case, dict(case.shape), case.passes) for suite, case in chosen])
        facts = {"bench": "kernels", "passes": "fwd+dx", "ours": 1.0, "device": DEVICE, "versions": {}, "commit": "c"}
        return [BenchLine.model_validate({**facts, "case": case.case, "date": "2026-01-01"}) for _, case in chosen]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: DEVICE)
    monkeypatch.setattr(verify_jobs, "verify_in_jobs", fakes.verified_but_router(happened))
    monkeypatch.setattr(bench, "bench_chosen", timed)
    return happened


def test_what_is_called_is_verified_and_timed_and_the_rest_is_said(
    cli, device: list[object], plan_file: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.jsonl"
    done = cli("kernels", "bench", "--plan", plan_file, "--evidence", mine, "-o", tmp_path)
    assert device == [("verified", ("rms_norm",)), [("rms_norm", "plan/rms_norm/H64-T64", NORM, ("fwd+dx",))]]
    assert done.code == 0 and "plan/rms_norm/H64-T64" in done.out and f"--evidence {mine}" in done.err
    assert "not timed: [kernel/no-inputs]" in done.err and "linear_cross_entropy at H64,T64,V5" in done.err
    device.clear()
    assert cli("kernels", "bench", "--plan", plan_file, "-o", tmp_path).code == 0
    assert len(device) == 1, "nothing is verified where no evidence is asked for"


def test_what_is_wrong_on_the_device_is_not_timed(cli, device: list[object], older: AdaptationPlan, tmp_path) -> None:  # type: ignore[no-untyped-def]
    with_calls(older, (call("router", T=8192, E=256, k=8), CALLS[0])).save(tmp_path / "p.json")
    done = cli("kernels", "bench", "--plan", tmp_path / "p.json", "--evidence", tmp_path / "m.jsonl", "-o", tmp_path)
    assert device[0] == ("verified", ("router", "rms_norm"))
    assert [one[0] for one in device[1]] == ["rms_norm"]  # type: ignore[attr-defined]
    assert done.code == 9 and "check/kernel-wrong" in done.err and "kernels verify router" in done.err


def test_times_of_another_device_than_the_plans_are_not_taken(
    cli, device: list[object], plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Other GPU")
    done = cli("kernels", "bench", "--plan", plan_file)
    assert done.code == 2 and device == [] and "usage/other-device" in done.err and "Other GPU" in done.err


def test_a_rejected_fusion_calls_nothing(older: AdaptationPlan) -> None:
    loaded = with_calls(older, CALLS)
    rejected = tuple(f.model_copy(update={"rejected": True}) for f in loaded.decision.fusions)
    assert rejected and calls_of(loaded, where="")
    decision = loaded.decision.model_copy(update={"fusions": rejected})
    assert calls_of(AdaptationPlan.seal(decision, loaded.evidence), where="") == ()
