"""Options of the verbs that need no training: offline, language model, search, time limits; what the system says."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import workflow_fakes as fakes

from shardwright.agents.llm.endpoint import URL as URL_VARIABLE
from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.cluster import Calibration
from shardwright.schemas.errors import RunError, UsageError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.run import ExpertLoad, RunRecord
from shardwright.workflows import following
from shardwright.workflows.drive import drive
from shardwright.workflows.lock import RunLock
from shardwright.workflows.prepare import fresh_request
from shardwright.workflows.request import Request, SearchRequest, default_run_dir
from shardwright.workflows.review.session import ReviewSession
from shardwright.workflows.search_options import options_of, search_request, stages_for
from shardwright.workflows.stages import Stages

PROGRAM = [sys.executable, "-m", "shardwright.workflows.cli.main"]


def words(verb: str, inputs: Path, *more: object) -> list[object]:
    return [verb, inputs / "checkpoint", "-c", "cpu-2", "-r", inputs / "recipe.yaml", *more]


@pytest.mark.parametrize("verb", ["plan", "adapt"])
def test_a_required_language_model_that_no_endpoint_serves_ends_with_8(cli, inputs, monkeypatch, verb) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    done = cli(*words(verb, inputs, "--llm", "required"))
    assert done.code == 8 and "error: [llm/no-endpoint]" in done.err and URL_VARIABLE in done.err
    assert "rules alone give a complete plan" in done.err and done.out == ""
    done = cli(*words(verb, inputs, "--llm", "required", "--offline"))
    assert done.code == 8 and "llm/offline" in done.err
    assert cli(*words(verb, inputs, "--llm", "always")).code == 2


def test_advice_that_nobody_gives_is_told_and_the_work_goes_on(cli, inputs, monkeypatch) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    done = cli(*words("plan", inputs, "--llm", "advise"))
    assert "no language model advises" in done.err and "rules alone decide" in done.err
    assert "checkpoint/" in done.err, "the empty folder is looked at afterwards"


@pytest.mark.parametrize("verb", ["inspect", "plan", "adapt"])
def test_offline_asks_no_hub(cli, inputs, verb) -> None:
    more = [] if verb == "inspect" else ["-c", "cpu-2", "-r", inputs / "recipe.yaml"]
    done = cli(verb, "hf://org/model@main", *more, "--offline")
    assert done.code == 1 and "error: [checkpoint/offline]" in done.err and "where: hf://org/model@main" in done.err


def test_wrong_search_and_time_options_are_said(cli, inputs, tmp_path) -> None:
    for verb in ("plan", "adapt"):
        done = cli(*words(verb, inputs, "--calibration", tmp_path / "none.json"))
        assert done.code == 2 and "none.json" in done.err
        done = cli(*words(verb, inputs, "--load-profile", tmp_path))
        assert done.code == 2 and "usage/no-loads" in done.err
        done = cli(*words(verb, inputs, "--time-limit", "structure"))
        assert done.code == 2 and "usage/bad-time-limit" in done.err
        assert cli(*words(verb, inputs, "--time-budget", "0")).code == 2


@pytest.fixture
def measured(tmp_path: Path) -> tuple[Path, Path]:
    """A calibration and a run's record with expert loads."""
    curves = tmp_path / "calibration.json"
    write_atomic(curves, pretty_bytes(Calibration(device="CPU", versions={"torch": "2"})))
    record = RunRecord(
        decision_sha256=fakes.H,
        evidence_sha256=fakes.H,
        status="trained",
        world_size=1,
        device="CPU",
        versions={},
        expert_loads=(ExpertLoad(layer="0", tokens=(3, 1)),),
    )
    write_atomic(tmp_path / "loads" / "run.json", pretty_bytes(record))
    return curves, tmp_path / "loads"


def test_search_options_are_pinned_and_come_back_with_the_run(measured) -> None:
    curves, loads = measured
    asked = search_request(curves, loads, time_budget_s=3.0)
    assert asked is not None
    again = options_of(SearchRequest.model_validate_json(asked.model_dump_json()))
    assert again.calibration is not None and again.loads == ((0.75, 0.25),) and again.time_budget_s == 3.0
    (loads / "run.json").write_text((loads / "run.json").read_text().replace("trained", "running"))
    with pytest.raises(RunError, match="changed-input"):
        options_of(asked)


def test_a_run_without_search_options_keeps_the_name_it_had(request_of, measured) -> None:
    plain: Request = request_of()
    assert "search" not in plain.model_dump(mode="json")
    other = plain.model_copy(update={"search": search_request(*measured)})
    assert default_run_dir(other) != default_run_dir(plain)
    assert stages_for(other).search is not stages_for(plain).search


def test_a_calibration_of_adapt_is_named_by_its_plan(tmp_path, inputs, measured, approving) -> None:
    stages = fakes.fake_stages()
    search = search_request(measured[0], None)
    folder, recipe = inputs / "checkpoint", inputs / "recipe.yaml"
    request = fresh_request("adapt", folder, "fake-2", recipe, 4, stages, search=search)
    done = drive(request, tmp_path / "run", stages=stages, policy=approving)
    plain = fresh_request("adapt", folder, "fake-2", recipe, 4, stages)
    bare = drive(plain, tmp_path / "bare", stages=stages, policy=approving)
    assert done.plan.evidence.provenance.calibration_digest is not None
    assert bare.plan.evidence.provenance.calibration_digest is None
    assert done.plan.hashes.decision == bare.plan.hashes.decision
    copied = tmp_path / "elsewhere.json"
    done.plan.save(copied)
    assert ReviewSession.open(tmp_path / "run" / "plan.json").stages.estimate is not Stages().estimate
    with pytest.raises(UsageError, match="calibration-elsewhere"):
        ReviewSession.open(copied).stages.estimate()
    bare.plan.save(copied)
    assert ReviewSession.open(copied).stages.estimate is Stages().estimate


def test_a_language_models_fusions_and_plans_are_priced_as_the_searchs(request_of, measured) -> None:
    asked = request_of().model_copy(update={"search": search_request(*measured)})
    advise, search = stages_for(asked).advise, stages_for(asked).search
    assert advise.keywords["calibration"] == search.keywords["calibration"] is not None
    assert advise.keywords["loads"] == search.keywords["loads"] == ((0.75, 0.25),)


@pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", "..", "a/b"])
def test_no_name_leads_a_run_out_of_its_folder(inputs, name) -> None:
    recipe = inputs / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("name: fake", f"name: '{name}'"))
    request = fresh_request("adapt", inputs / "checkpoint", "fake-2", recipe, 4, fakes.fake_stages())
    folder = default_run_dir(request)
    assert folder.parent == Path("runs") and ".." not in folder.parts


@pytest.mark.parametrize(
    ("number", "code", "advice"),
    [
        (errno.ENOSPC, "enospc", "free some space"),
        (errno.EACCES, "eacces", "permissions"),
        (errno.EIO, "eio", "mend that"),
    ],
)
def test_what_the_system_refuses_reads_as_every_other_error(cli, monkeypatch, number, code, advice) -> None:
    def examine() -> None:
        raise OSError(number, "refused", "/some/file")

    monkeypatch.setattr("shardwright.workflows.machine.examine", examine)
    done = cli("doctor")
    assert done.code == 1 and f"error: [system/{code}]" in done.err
    assert "where: /some/file" in done.err and advice in done.err and "Traceback" not in done.err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    script = f"set -o pipefail; {' '.join(PROGRAM)} show --schema AdaptationPlan | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_followed_lines_come_as_they_are_written(tmp_path, request_of, approving) -> None:
    """Old lines at first, new ones while somebody works there, an end when nobody does."""
    run = tmp_path / "run"
    drive(request_of(), run, stages=fakes.fake_stages(), policy=approving)
    lock = RunLock(run)
    lock.__enter__()
    asleep: list[float] = []

    def sleep(seconds: float) -> None:
        asleep.append(seconds)
        with open(run / "metrics.jsonl", "a") as stream:
            step = len(asleep)
            stream.write(f'{{"kind": "step", "step": {step}, "loss": 2.5, "tokens": 100, "seconds": 0.5}}\n')
            stream.write('{"kind": "step", "cut off')
            stream.write("\n")
        if len(asleep) == 3:
            lock.__exit__(None, None, None)

    found = list(following.follow(run, 2, sleep=sleep))
    assert len(found) == 5 and "report" in found[1]
    assert found[2:] == [f"step     {n}  loss 2.5000  200 tokens/s" for n in (1, 2, 3)]
    assert threading.active_count() >= 1 and asleep == [following.POLL_S] * 3


def test_following_a_folder_that_is_no_run_is_said(cli, tmp_path) -> None:
    done = cli("logs", tmp_path / "none", "-f")
    assert done.code == 1 and "run/no-run" in done.err


def test_a_timeline_is_shown_beside_the_prediction(cli, finished) -> None:
    run = finished.run_dir
    done = cli("profile", run)
    assert done.code == 1 and "run/no-profile" in done.err and "SHARDWRIGHT_PROFILE_STEP" in done.err
    span = {"ph": "X", "tid": 1, "pid": 1}
    events = [
        {**span, "name": "shardwright:step", "cat": "user_annotation", "ts": 0.0, "dur": 10_000.0},
        {**span, "name": "aten::mm", "cat": "cpu_op", "ts": 1_000.0, "dur": 6_000.0},
        {**span, "name": "gloo:all_reduce", "cat": "user_annotation", "ts": 6_000.0, "dur": 2_000.0},
    ]
    write_atomic(run / "profile" / "step-2.json", json.dumps({"traceEvents": events}).encode())
    told = json.loads(cli("profile", run, "--output", "json").out)
    assert told["measured_ms"] == {
        "compute": 6.0,
        "optimizer": 0.0,
        "exposed_communication": 1.0,
        "hidden_communication": 1.0,
        "launch": 3.0,
        "step": 10.0,
    }
    assert told["predicted_ms"]["step"] == 10.0 and told["predicted_ms"]["compute"] == 10.0
    assert "exposed communication" in cli("profile", run).out
