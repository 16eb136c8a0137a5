"""Ends from outside a verb: signals, the operating system, a closed pipe; and what reports say when nothing began."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import review_plans

from shardwright.workflows import prepare
from shardwright.workflows.cli.faults import wants_json

GO_ON = "interrupted; the same command goes on from here"


def plan(cli, inputs: Path, *more: object):
    return cli("plan", inputs / "checkpoint", "-c", "cpu-2", "-r", inputs / "recipe.yaml", *more)


def raising(error: BaseException):
    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


def test_a_signal_is_said_in_words_and_as_json(cli, inputs, monkeypatch) -> None:
    monkeypatch.setattr(prepare, "load_recipe", raising(KeyboardInterrupt()))
    done = plan(cli, inputs)
    assert done.code == 130 and done.err.strip() == GO_ON and done.out == ""
    done = plan(cli, inputs, "--output", "json")
    assert done.code == 130 and json.loads(done.out)["error"]["code"] == "interrupted/by-signal"


def test_a_full_disk_is_said_in_words_and_as_json(cli, inputs, monkeypatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "runs/plan.json")
    monkeypatch.setattr(prepare, "load_recipe", raising(full))
    done = plan(cli, inputs, "--output=json")
    assert done.code == 1 and "error: [system/enospc] No space left on device\n  where: runs/plan.json" in done.err
    error = json.loads(done.out)["error"]
    assert error["code"] == "system/enospc" and error["next"].startswith("free some space")


def test_every_verb_with_json_puts_its_error_on_stdout_once(cli, inputs) -> None:
    done = cli("inspect", inputs / "nowhere", "--output", "json")
    assert done.code == 1 and json.loads(done.out)["error"]["code"] == "checkpoint/missing-folder"
    done = cli("apply", inputs / "nowhere.json", "--checkpoint", inputs / "checkpoint", "--output", "json")
    assert json.loads(done.out)["error"]["code"] == "plan/missing"
    assert cli("inspect", inputs / "nowhere").out == ""


def test_a_result_that_is_wrong_stays_one_document(cli, monkeypatch) -> None:
    from shardwright.kernels.verify import VerifyResult
    from shardwright.workflows import operators

    wrong = VerifyResult(op="rms_norm", case="8x64", value="y", ok=False, error=0.5, eager_error=1e-3, allowed=2e-3)
    monkeypatch.setattr(operators, "verify_operators", lambda ops: [wrong])
    done = cli("kernels", "verify", "--output", "json")
    assert done.code == 9 and "check/kernel-wrong" in done.err
    assert [found["op"] for found in json.loads(done.out)] == ["rms_norm"]


def test_a_place_that_takes_no_file_is_said_before_any_work(cli, inputs, monkeypatch) -> None:
    monkeypatch.setattr(prepare, "load_recipe", raising(AssertionError("work began")))
    assert "error: [usage/not-a-file] this is a folder" in plan(cli, inputs, "-o", inputs).err
    done = plan(cli, inputs, "-o", inputs / "recipe.yaml" / "plan.json")
    assert done.code == 1 and f"[system/enotdir] Not a directory\n  where: {inputs / 'recipe.yaml'}" in done.err
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    done = plan(cli, inputs, "-o", inputs / "new" / "plan.json", "--report", inputs / "r.html")
    assert done.code == 1 and f"[system/eacces] Permission denied\n  where: {inputs}" in done.err
    assert not (inputs / "new").exists()


def test_a_name_that_is_no_text_is_refused_before_any_work(cli, inputs) -> None:
    odd = os.fsdecode(b"n\xe9t")
    done = cli("plan", odd, "-c", "cpu-2", "-r", inputs / "recipe.yaml")
    assert done.code == 2 and "error: [usage/not-text] 'n\\udce9t' is not UTF-8" in done.err
    assert "not-text" not in cli("inspect", inputs / "sp ace é").err


def test_which_command_lines_want_json() -> None:
    assert wants_json(["show", "--json"]) and wants_json(["plan", "--output", "json"]) and wants_json(["--output=json"])
    assert not wants_json(["plan", "--output"]) and not wants_json(["json", "--output", "text"]) and not wants_json([])


@pytest.mark.parametrize("end", ["refused", "interrupted"])
def test_reports_tell_of_this_command_though_no_run_began(cli, inputs, tmp_path, monkeypatch, end) -> None:
    """A success that an earlier job left in the folder must never be published for this one."""
    reports = tmp_path / "reports"
    reports.mkdir()
    for name in ("result.json", "summary.md", "junit.xml", "results.sarif"):
        (reports / name).write_text("of an earlier run")
    code = "recipe/missing"
    if end == "interrupted":
        code = "interrupted/by-signal"
        monkeypatch.setattr(prepare, "load_recipe", raising(KeyboardInterrupt()))
    words = ("adapt", inputs / "checkpoint", "-c", "cpu-2", "-r", tmp_path / "absent.yaml", "--reports", reports)
    done = cli(*words)
    assert done.code == {"refused": 2, "interrupted": 130}[end] and done.out == ""
    result = json.loads((reports / "result.json").read_text())
    assert result["run_dir"] is None and result["error"]["code"] == code
    (case,) = ElementTree.parse(reports / "junit.xml").getroot().iter("testcase")
    assert code in case[0].attrib["message"] + (case[0].text or "")
    assert (reports / "summary.md").read_text().startswith(f"### ✗ {code}")
    assert code in (reports / "results.sarif").read_text()


def test_a_reader_that_has_seen_enough_is_no_fault(tmp_path) -> None:
    review_plans.plan_of(review_plans.many(40)).save(tmp_path / "plan.json")
    program = [sys.executable, "-m", "shardwright.workflows.cli.main", "show", tmp_path / "plan.json", "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        running.stdout.close()
        words = running.stderr.read()
        assert running.wait(60) == 0 and words == b""
