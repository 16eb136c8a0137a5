"""The CI templates: their steps are run here as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = ROOT / "ci" / "github" / "action.yml"
GITLAB = ROOT / "ci" / "gitlab" / "shardwright.yml"


@pytest.fixture
def shell(tmp_path: Path):
    """Run a script as a CI runner would, with ``shardwright`` on the path."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "shardwright").write_text(f'#!/bin/sh\nexec {sys.executable} -m shardwright.workflows.cli.main "$@"\n')
    (commands / "shardwright").chmod(0o755)

    def run(script: str, environment: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        command = ["timeout", "-k", "5", "300", "bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=cwd, env={**os.environ, **path, **environment}
        )

    return run


def resolved(value: str, inputs: dict[str, str]) -> str:
    """``${{ inputs.name }}`` replaced, as the runner does in a step's environment."""
    return re.sub(r"\$\{\{ inputs\.([a-z-]+) \}\}", lambda found: inputs[found.group(1)], value)


def github(tiny: Path, **given: str) -> tuple[str, dict[str, str]]:
    action = yaml.safe_load(ACTION.read_text())
    inputs = {name: item.get("default", "") for name, item in action["inputs"].items()} | given
    assert all(inputs[name] for name, item in action["inputs"].items() if item.get("required"))
    (step,) = action["runs"]["steps"]
    environment = {name: resolved(value, inputs) for name, value in step["env"].items()}
    assert "${{" not in step["run"] + "".join(environment.values()), "nothing from outside becomes script text"
    files = {"GITHUB_OUTPUT": str(tiny / "output"), "GITHUB_STEP_SUMMARY": str(tiny / "summary.md")}
    return step["run"], {**environment, **files}


INPUTS = {"checkpoint": "checkpoint", "cluster": "cpu-2", "recipe": "recipe.yaml", "policy": "policy.yaml"}


@pytest.mark.slow
def test_the_github_action_adapts_and_reports(shell, tiny) -> None:
    script, environment = github(tiny, **INPUTS)
    done = shell(script, environment, tiny)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tiny / "output").read_text() == "exit-code=0\n"
    summary = (tiny / "summary.md").read_bytes()
    assert b"MixtralForCausalLM adapted" in summary and len(summary) < 1 << 20
    reports = tiny / "shardwright-reports"
    assert json.loads((reports / "result.json").read_text())["adapter"]["tensors"] > 0
    suites = {suite.get("name") for suite in ElementTree.parse(reports / "junit.xml").getroot()}
    assert suites == {"certificates", "policy", "checks", "run"}
    assert json.loads((reports / "results.sarif").read_text())["runs"][0]["results"] == []


def test_the_gitlab_job_ends_with_the_policys_code_and_its_reports(shell, tiny) -> None:
    (tiny / "policy.yaml").write_text("max_step_ms: 0.001\nwarn: [max_memory_fraction]\napprove: true\n")
    job = yaml.safe_load(GITLAB.read_text())[".shardwright-adapt"]
    given = {"CHECKPOINT": "checkpoint", "CLUSTER": "cpu-2"}
    done = shell("\n".join(job["script"]), {**job["variables"], **given}, tiny)
    assert done.returncode == 4 and "policy/violated" in done.stderr, done.stderr[-3000:]
    reports = tiny / job["variables"]["REPORTS"]
    assert {path.name for path in reports.iterdir()} == {"result.json", "summary.md", "junit.xml", "results.sarif"}
    assert "max_step_ms" in (reports / "summary.md").read_text()
    (run,) = json.loads((reports / "results.sarif").read_text())["runs"]
    assert [(item["ruleId"], item["level"]) for item in run["results"]] == [("policy/max_step_ms", "error")]
    failed = [
        case.get("name") for case in ElementTree.parse(reports / "junit.xml").getroot().iter("testcase") if len(case)
    ]
    assert failed == ["max_step_ms", "finished"]
    assert job["artifacts"]["reports"]["junit"] == "$REPORTS/junit.xml" and job["allow_failure"]["exit_codes"] == 3


def test_exit_code_of_the_action_is_an_output_when_it_fails(shell, tiny) -> None:
    script, environment = github(tiny, **{**INPUTS, "checkpoint": "no-such-folder"})
    done = shell(script, environment, tiny)
    assert done.returncode == 1 and (tiny / "output").read_text() == "exit-code=1\n"
