"""Every registered engine is held to one contract; the pages and the command line say what the list says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main

from shardwright.runtime.launch import engines as verbs
from shardwright.runtime.launch import local
from shardwright.runtime.launch.engine import Engine
from shardwright.runtime.launch.job import Job, read_state
from shardwright.runtime.launch.options import COMMON, LaunchOptions, parse_options, read_options, write_options
from shardwright.runtime.launch.registry import NAMES, engine, engines, table
from shardwright.runtime.launch.testkit import EngineContract
from shardwright.schemas.errors import UsageError
from shardwright.workflows.cli.main import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def job(tiny: Any, make_job: Any, strategy: Any) -> Job:
    """Two nodes with two H200 each."""
    chosen = strategy(ep=4)
    named = {"device_type": "cuda", "device_name": "NVIDIA H200", "world_size": 4, "devices_per_node": 2}
    cluster = make_job(tiny, chosen).plan.decision.cluster.model_copy(update=named)
    made = make_job(tiny, chosen, cluster=cluster)
    return Job.of(made.plan_path, tiny.checkpoint, tiny.data, made.approvals, made.run_dir)


@pytest.mark.parametrize("engine", engines(), ids=NAMES)
class TestEngines(EngineContract):
    """Whoever is in the list."""


def sound(job: Job, options: LaunchOptions) -> dict[str, str]:
    """What an engine of one option renders."""
    body = {"image": options.image, "restarts": options.max_restarts, "worker": job.worker_arguments}
    return {"job.json": json.dumps({"module": "shardwright.runtime.worker", **body}) + "\n"}


MADE = Engine(
    name="local",
    happens="nothing",
    tested_on="nothing",
    render=sound,
    options=frozenset({"image"}),
    submit_with="submit {path}",
)


def edited(change: Callable[[dict[str, Any], LaunchOptions], None]) -> Any:
    """``sound`` with its document changed."""

    def render(job: Job, options: LaunchOptions) -> dict[str, str]:
        body = json.loads(sound(job, options)["job.json"])
        change(body, options)
        return {"job.json": json.dumps(body) + "\n"}

    return render


BROKEN = {
    "test_its_words_fit_a_row": replace(MADE, happens="this | that"),
    "test_it_starts_jobs_or_says_who_does": replace(MADE, submit_with=""),
    "test_its_options_exist_and_each_changes_what_is_rendered": replace(MADE, options=frozenset({"image", "qos"})),
    "test_it_reads_no_other_option": replace(MADE, render=edited(lambda body, o: body.update(account=o.account))),
    "test_rendering_is_repeatable_and_writes_nothing": replace(
        MADE, render=lambda job, options, calls=[]: calls.append(0) or {"job.sh": f"echo {len(calls)}\n"}
    ),
    "test_files_are_plain_names_and_read_as_their_ending_says": replace(
        MADE, render=lambda job, options: {"job.sh": "if true\n"}
    ),
    "test_workers_get_the_plan_its_inputs_and_the_run_directory": replace(
        MADE, render=lambda job, options: {"job.sh": "-m shardwright.runtime.worker " + " ".join(job.worker_arguments)}
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_contract_tells_a_sound_engine_from_a_broken_one(name: str, job: Job) -> None:
    check = getattr(EngineContract(), name)
    arguments = {"engine": MADE, "job": job}
    taken = {word: arguments[word] for word in check.__annotations__ if word in arguments}
    check(**taken)
    with pytest.raises(AssertionError):
        check(**{**taken, "engine": BROKEN[name]})


def test_every_option_has_a_reader() -> None:
    assert set().union(*(one.options for one in engines())) | COMMON == {*LaunchOptions.model_fields}


def test_the_page_and_the_command_line_say_what_the_list_says() -> None:
    """docs/runs.md holds :func:`table` as it is; where this fails, put it there."""
    assert table() in (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    command: Any = typer.main.get_command(app)
    for verb in ("apply", "adapt"):
        told = next(one.help for one in command.commands[verb].params if "--launch" in one.opts)
        assert f"Engine ({', '.join(NAMES)})" in told


def test_a_file_of_the_folder_is_an_engine_or_not_by_the_list_alone() -> None:
    folder = ROOT / "runtime" / "launch"
    declared = {path.stem for path in folder.glob("*.py") if "\nENGINE = Engine(" in path.read_text(encoding="utf-8")}
    assert declared == {*NAMES}
    assert [one.name for one in engines()] == [*NAMES]


def test_an_engine_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown-engine") as caught:
        engine("sge")
    assert "local, slurm" in caught.value.what
    path = tmp_path / "launch.yaml"
    path.write_text("engine: sge\n")
    with pytest.raises(UsageError, match="engine: expected one of local, slurm"):
        parse_options(str(path))
    (tmp_path / "launch_options.json").write_text('{"engine": "sge"}')
    with pytest.raises(UsageError, match="launch-options"):
        read_options(tmp_path)


def test_an_option_that_the_engine_does_not_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text("engine: ray\naddress: auto\npartition: gpu\n")
    with pytest.raises(UsageError, match="option-not-read") as caught:
        parse_options(str(path))
    assert caught.value.what == "ray does not read partition" and caught.value.next_action.endswith(": slurm")
    path.write_text("engine: kubernetes\nimage: r/s:1\npreflight: true\nmax_restarts: 1\n")
    assert parse_options(str(path)).image == "r/s:1"


def test_a_rank_that_another_launcher_started_starts_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """H5: under ``RANK`` it is that rank, whatever engine the run directory names; nothing is submitted again."""
    seen: list[Path] = []
    monkeypatch.setattr(local, "launch", lambda *paths, **rest: seen.extend(paths) or 3)
    monkeypatch.setenv("RANK", "1")
    for name in NAMES:
        run_dir = tmp_path / name
        write_options(run_dir, LaunchOptions(engine=name))
        assert verbs.launch(job.plan_path, job.checkpoint, job.data_root, job.approvals, run_dir) == 3
        assert read_state(run_dir) == {"engine": "local", "job_id": "", "where": "this machine"}
        assert {path.name for path in run_dir.iterdir()} == {"launch.json", "launch_options.json"}
    assert seen.count(job.plan_path) == len(NAMES)


def test_workers_that_read_their_options_import_no_engine() -> None:
    script = (
        "import sys, shardwright.runtime.launch.options as options\n"
        "print(*(name for name in options.NAMES if f'{options.__package__}.{name}' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
