"""The contract of an engine as a test class. ``tests/runtime/test_launch_engines.py`` holds every registered one to it.

Whether a scheduler accepts what is rendered, and whether a killed run ends as an unbroken one, is each engine's own
test (``tests/runtime/test_launch.py``, ``test_launch_ray.py``, ``test_launch_skypilot.py``).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.runtime.launch import engines
from shardwright.runtime.launch.engine import Engine
from shardwright.runtime.launch.job import STATE, Job, write_state
from shardwright.runtime.launch.options import COMMON, LaunchOptions, write_options
from shardwright.runtime.launch.registry import NAMES
from shardwright.schemas.errors import ClusterError, UsageError

FOLDER = Path(__file__).parent
LOOPBACK = re.compile(r"127\.0\.0\.1:\d+")
"""A rendezvous on this machine takes a port that is free when it is asked for."""


def sample(name: str, text: str) -> Any:
    """A value of an option, other than its default; ``text`` makes it one of many."""
    default = LaunchOptions.model_fields[name].get_default()
    if isinstance(default, int):
        return default + len(text)
    return (f"--{text}",) if isinstance(default, tuple) else text


def options_of(engine: Engine) -> LaunchOptions:
    """Every option that an engine reads, set."""
    chosen = {name: sample(name, "one") for name in engine.options}
    return LaunchOptions.model_validate({"engine": engine.name, **chosen})


def rendered(engine: Engine, job: Job, options: LaunchOptions) -> dict[str, str]:
    """What an engine renders, ports of this moment left out."""
    return {name: LOOPBACK.sub("127.0.0.1:PORT", text) for name, text in engine.render(job, options).items()}


def scripts(texts: dict[str, str]) -> Iterator[str]:
    """Every text that a shell reads: files, and strings of several lines inside documents."""
    for name, text in texts.items():
        if name.endswith((".yaml", ".json")):
            yield from (one for one in _strings(parsed(name, text)) if "\n" in one)
        else:
            yield text


def parsed(name: str, text: str) -> Any:
    """A document as a reader of its kind sees it."""
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def words(texts: dict[str, str]) -> list[str]:
    """All words in order, as the programs that read the files would see them."""
    found: list[str] = []
    for name, text in texts.items():
        strings = _strings(parsed(name, text)) if name.endswith((".yaml", ".json")) else [text]
        for one in strings:
            is_script = "\n" in one
            found += shlex.split(one.replace("\\\n", " "), comments=True) if is_script else [one]
    return found


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


def contains(whole: list[str], part: list[str]) -> bool:
    """Whether ``part`` stands in ``whole`` without a gap."""
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


class EngineContract:
    """Parametrise over ``engine``, and give ``job``: two nodes with two CUDA ranks each."""

    def test_it_is_one_file_that_knows_no_other_engine(self, engine: Engine) -> None:
        assert engine.name in NAMES
        source = (FOLDER / f"{engine.name}.py").read_text(encoding="utf-8")
        imported = {
            name
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.ImportFrom) and node.module
            for name in (node.module.rpartition(".")[2], *(alias.name for alias in node.names))
        }
        assert imported & {*NAMES} - {engine.name} == set()

    def test_its_words_fit_a_row(self, engine: Engine) -> None:
        for text in (engine.happens, engine.tested_on):
            assert text.strip() == text != "" and not set("|\n") & set(text)

    def test_it_starts_jobs_or_says_who_does(self, engine: Engine) -> None:
        assert (engine.start is None) == bool(engine.submit_with)
        assert engine.start is not None or "{path}" in engine.submit_with
        assert engine.start is not None or not (engine.state or engine.cancel or engine.command or engine.package)

    def test_its_options_exist_and_each_changes_what_is_rendered(self, engine: Engine, job: Job) -> None:
        assert engine.options <= {*LaunchOptions.model_fields} - COMMON
        options = options_of(engine)
        before = rendered(engine, job, options)
        for name in (*engine.options, "max_restarts"):
            changed = options.model_copy(update={name: sample(name, "other")})
            assert rendered(engine, job, changed) != before, f"{name} is declared and changes nothing"

    def test_it_reads_no_other_option(self, engine: Engine, job: Job) -> None:
        options = options_of(engine)
        before = rendered(engine, job, options)
        for name in {*LaunchOptions.model_fields} - engine.options - COMMON:
            changed = options.model_copy(update={name: sample(name, "other")})
            assert rendered(engine, job, changed) == before, f"{name} is read and not declared"

    def test_rendering_is_repeatable_and_writes_nothing(self, engine: Engine, job: Job) -> None:
        options = options_of(engine)
        assert rendered(engine, job, options) == rendered(engine, job, options) != {}
        assert not job.run_dir.exists()

    def test_files_are_plain_names_and_read_as_their_ending_says(self, engine: Engine, job: Job) -> None:
        texts = rendered(engine, job, options_of(engine))
        for name, text in texts.items():
            assert Path(name).name == name and text.endswith("\n"), name
            assert not name.endswith((".yaml", ".json")) or isinstance(parsed(name, text), dict), name
        for script in scripts(texts):
            done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
            assert done.returncode == 0, done.stderr

    def test_workers_get_the_plan_its_inputs_and_the_run_directory(self, engine: Engine, job: Job) -> None:
        """Also under paths that a shell would cut."""
        spaced = replace(job, run_dir=job.run_dir.parent / "a run", data_root=job.data_root.parent / "my $data")
        for one in (job, spaced):
            said = words(rendered(engine, one, options_of(engine)))
            assert contains(said, one.worker_arguments)
            assert any("shardwright.runtime" in word for word in said)

    def test_without_its_options_it_renders_or_says_which_is_missing(self, engine: Engine, job: Job) -> None:
        try:
            assert rendered(engine, job, LaunchOptions.model_validate({"engine": engine.name}))
        except UsageError as error:
            assert any(name in error.next_action for name in engine.options)

    def test_a_missing_tool_is_named_before_anything_is_written(
        self, engine: Engine, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not engine.command and not engine.package:
            return
        assert engine.start is not None
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == engine.package else find(name, *rest)
        )
        monkeypatch.setenv("PATH", "")
        with pytest.raises(ClusterError, match=f"no-{engine.name}"):
            engine.start(job, options_of(engine), lambda text: None)
        assert not job.run_dir.exists()

    def test_where_only_files_are_written_the_next_command_is_told(self, engine: Engine, job: Job) -> None:
        if engine.start is not None:
            return
        options = options_of(engine)
        write_options(job.run_dir, options)
        with pytest.raises(UsageError, match="rendered-only") as caught:
            engines.launch(job.plan_path, job.checkpoint, job.data_root, job.approvals, job.run_dir)
        texts = engine.render(job, options)
        assert {name: (job.run_dir / name).read_text(encoding="utf-8") for name in texts} == texts
        assert engine.submit_with.format(path=job.run_dir / next(iter(texts))) in caught.value.next_action
        assert not (job.run_dir / STATE).exists()

    def test_a_job_that_nobody_remembers_is_told_and_not_stopped(
        self, engine: Engine, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``status`` of a run whose scheduler is out of reach; ``cancel`` stops nothing without saying so."""
        write_state(job.run_dir, engine.name, "7", "somewhere")
        monkeypatch.setenv("PATH", "")
        line = engines.where(job.run_dir)
        assert line.startswith(engine.name) and "7" in line and "\n" not in line
        try:
            assert engines.cancel(job.run_dir) is None
        except ClusterError as error:
            assert error.code == f"cluster/no-{engine.name}"
