"""``watch``: twenty checkpoints, one broken; once each, under a lock; a dead run is taken up again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import workflow_fakes as fakes

from shardwright.kernels.evidence import EvidenceStore
from shardwright.kernels.registry import source_sha256
from shardwright.schemas.errors import CheckpointError, ExitCode, RunError, UsageError
from shardwright.schemas.ops import MeasuredTime
from shardwright.schemas.plan import load_plan
from shardwright.schemas.policy import Policy
from shardwright.workflows.lock import RunLock
from shardwright.workflows.watch import Seen, Watch, pass_over, worst


def profile(folder: Path):
    if not (folder / "config.json").is_file():
        raise CheckpointError("missing-config", "no config.json", where=str(folder), next_action="complete it")
    return fakes.profile()


@pytest.fixture
def watch(tmp_path: Path, inputs: Path) -> Watch:
    for number in range(20):
        folder = tmp_path / "models" / f"model-{number:02d}"
        folder.mkdir(parents=True)
        if number != 7:
            (folder / "config.json").write_text("{}")
    (tmp_path / "models" / ".partial").mkdir()
    return Watch(
        tmp_path / "models",
        tmp_path / "runs",
        "fake-2",
        inputs / "recipe.yaml",
        Policy(approve=True),
        4,
        fakes.fake_stages(profile=profile),
        lambda: {"rms_norm": fakes.H},
    )


def measured_time(**changes: object) -> MeasuredTime:
    facts: dict[str, object] = {
        "op": "rms_norm", "provider": "shardwright", "pass_name": "fwd+dx", "driver": "", "versions": {},
        "device": fakes.cluster_spec().device.name, "source_sha256": source_sha256("rms_norm"), "dtype": "float32",
        "shape_bucket": "H64,T64", "median_ms": 0.5, "floor_ms": 0.1, "peak_bytes": 0, "repeats": 7,
        "date": "2026-01-01",
    }  # fmt: skip
    return MeasuredTime.model_validate({**facts, **changes})


def look(watch: Watch) -> dict[str, Seen]:
    told: list[Seen] = []
    found = pass_over(watch, told.append)
    assert tuple(told) == found
    return {seen.checkpoint: seen for seen in found}


def launches(watch: Watch) -> int:
    return sum(fakes.effects(run).count("launch") for run in watch.out.glob("model-*"))


def test_twenty_checkpoints_one_broken_each_reported_once(watch) -> None:
    found = look(watch)
    assert len(found) == 20
    broken = found.pop("model-07")
    assert (broken.status, broken.code, broken.next) == ("failed", "checkpoint/missing-config", "complete it")
    assert {seen.status for seen in found.values()} == {"adapted"} and launches(watch) == 19
    assert worst((broken,)) == ExitCode.ERROR

    again = look(watch)
    assert again.pop("model-07").status == "failed"
    assert {seen.status for seen in again.values()} == {"unchanged"} and launches(watch) == 19

    (watch.folder / "model-07" / "config.json").write_text("{}")
    assert look(watch)["model-07"].status == "adapted" and launches(watch) == 20


def test_a_changed_kernel_or_checkpoint_adapts_again(watch) -> None:
    look(watch)
    (watch.folder / "model-03" / "config.json").write_text('{"new": 1}')
    found = look(watch)
    assert [name for name, seen in found.items() if seen.status == "adapted"] == ["model-03"]
    other = replace(watch, kernels=lambda: {"rms_norm": "cd" * 32})
    found = look(other)
    assert sum(seen.status == "adapted" for seen in found.values()) == 19
    assert launches(watch) == 19 + 1 + 19


def test_a_changed_file_of_measurements_adapts_again(watch, tmp_path: Path) -> None:
    """Own times and curves are part of the world; a file that cannot be read stops all before anything runs."""
    mine = tmp_path / "mine.jsonl"
    stored = EvidenceStore(mine)
    stored.add([measured_time()])
    own = replace(watch, evidence=(mine,))
    assert look(own)["model-00"].status == "adapted" and look(own)["model-00"].status == "unchanged"
    plan = load_plan(Path(look(own)["model-00"].run_dir) / "plan.json")
    assert [file.times for file in plan.evidence.provenance.evidence_files] == [1]
    stored.add([measured_time(provider="eager")])
    assert look(own)["model-00"].status == "adapted"
    with pytest.raises(UsageError, match="missing"):
        look(replace(watch, evidence=(tmp_path / "none.jsonl",)))
    with pytest.raises(UsageError, match="missing"):
        look(replace(watch, calibration=tmp_path / "none.json"))
    assert launches(watch) == 2 * 19


def test_only_one_watch_works(watch) -> None:
    with RunLock(watch.out / ".watch"), pytest.raises(RunError) as caught:
        look(watch)
    assert caught.value.code == "run/locked"


class Killed(BaseException):
    """What a SIGKILL leaves behind: nothing after it runs."""


def test_a_dead_run_is_taken_up_again(watch) -> None:
    def dies(*arguments: object) -> int:
        raise Killed

    with pytest.raises(Killed):
        look(replace(watch, stages=fakes.fake_stages(profile=profile, launch=dies)))
    assert launches(watch) == 0
    planned = [run for run in watch.out.glob("model-00-*") if (run / "plan.json").is_file()]
    assert len(planned) == 1
    before = (planned[0] / "memo").stat().st_mtime_ns
    found = look(watch)
    assert found["model-00"].status == "adapted" and Path(found["model-00"].run_dir) == planned[0]
    assert fakes.effects(planned[0]) == ["launch", "export"]
    events = (planned[0] / "events.jsonl").read_text()
    assert events.count('"node": "search", "kind": "started"') == 1, "what had finished is not planned twice"
    assert (planned[0] / "memo").stat().st_mtime_ns >= before


def test_denied_waiting_and_failed_end_with_their_codes(watch) -> None:
    denied = look(replace(watch, policy=Policy(max_memory_fraction=0.1, approve=True)))
    denied.pop("model-07")
    assert {seen.status for seen in denied.values()} == {"denied"}
    assert worst(tuple(denied.values())) == ExitCode.POLICY_DENIED
    waiting = look(replace(watch, policy=Policy(approve=False), out=watch.out / "other"))
    waiting.pop("model-07")
    assert worst(tuple(waiting.values())) == ExitCode.NEEDS_APPROVAL


def test_the_command_reports_a_broken_checkpoint(cli, tiny, tmp_path) -> None:
    (tmp_path / "models" / "broken").mkdir(parents=True)
    words = ["watch", tmp_path / "models", "-c", "cpu-2", "-r", tiny / "recipe.yaml", "--policy", tiny / "policy.yaml"]
    done = cli(*words, "--out", tmp_path / "runs", "--once")
    assert done.code == 1 and "checkpoint/missing-config" in done.out and "✗ broken: failed" in done.err
    assert cli(*words[:-1], tmp_path / "no.yaml", "--once").code == 2
