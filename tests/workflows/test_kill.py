"""SIGKILL at every node, at each moment of it, then the same command: it ends well and no effect happens twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import workflow_fakes as fakes

from shardwright.schemas.approval import read_log
from shardwright.schemas.plan import load_plan
from shardwright.workflows.adapt import NODES
from shardwright.workflows.events import read_events
from shardwright.workflows.runs import load_record

BESIDE = ("structure", "propose", "search")
"""Nodes of the two branches between ingest and join."""
SCRIPT = Path(__file__).with_name("kill_run.py")


def start(run: Path, inputs: Path, *moments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(run), str(inputs), *moments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def whole(run: Path) -> None:
    """The run is finished, with every effect once and nothing half-written."""
    assert fakes.effects(run) == ["launch", "export"]
    assert len(read_log(run / "approvals.jsonl")) == 1
    record = load_record(run)
    assert record is not None and record.status == "exported"
    load_plan(run / "plan.json")
    assert (run / "report.html").read_text().endswith("</html>\n")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    fakes.make_inputs(folder / "inputs")
    done = start(folder / "run", folder / "inputs")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.parametrize("moment", ["started", "finished"])
def test_killed_at_every_node_it_goes_on(moment: str, tmp_path: Path, inputs: Path, unbroken: Path) -> None:
    """Dies at one node after the other; each start goes on from where the one before was cut off."""
    run = tmp_path / "run"
    alone = [node for node in NODES if node not in BESIDE]
    for node in alone:
        killed = start(run, inputs, f"{node}:{moment}")
        assert killed.returncode == -signal.SIGKILL, (node, killed.stderr)
    done = start(run, inputs)
    assert done.stdout == "finished", done.stderr
    begun = Counter(event["node"] for event in read_events(run) if event["kind"] == "started")
    assert begun == {**dict.fromkeys(BESIDE, 1), **dict.fromkeys(alone, 2)}, "once to be killed and once to finish"
    whole(run)
    assert load_plan(run / "plan.json").hashes == load_plan(unbroken / "plan.json").hashes
    for name in ("report.md", "report.html", "plan.json"):
        ours, theirs = ((folder / name).read_text().replace(str(folder), "RUN") for folder in (run, unbroken))
        assert ours == theirs, name


@pytest.mark.parametrize("moment", ["started", "finished"])
@pytest.mark.parametrize("node", BESIDE)
def test_killed_in_a_branch_the_other_branch_is_kept(
    node: str, moment: str, tmp_path: Path, inputs: Path, unbroken: Path
) -> None:
    run = tmp_path / "run"
    assert start(run, inputs, f"{node}:{moment}").returncode == -signal.SIGKILL
    assert start(run, inputs).stdout == "finished"
    whole(run)
    assert load_plan(run / "plan.json").hashes == load_plan(unbroken / "plan.json").hashes
    computed = Counter(event["node"] for event in read_events(run) if event["kind"] == "computed")
    assert all(computed[name] <= 2 for name in BESIDE) and computed["join"] == 1


@pytest.mark.parametrize("moment", ["search:computed", "join:computed", "execute:computed", "review:note"])
def test_killed_between_work_and_its_record(moment: str, tmp_path: Path, inputs: Path) -> None:
    run = tmp_path / "run"
    assert start(run, inputs, moment).returncode == -signal.SIGKILL
    assert start(run, inputs).stdout == "finished"
    whole(run)
