"""The real thing on examples/tiny-moe: two gloo ranks, from checkpoint to proved adapter, killed on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

STEPS = 32
"""Long enough that a run can be caught in the middle."""

SLACK = float(os.environ.get("SHARDWRIGHT_TEST_SLACK", "1"))
"""Factor on time limits for a machine that does other work beside the tests."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def command(*arguments: object) -> list[str]:
    words = [sys.executable, "-m", "shardwright.workflows.cli.main", *map(str, arguments)]
    return ["timeout", "-k", "5", f"{150 * SLACK:.0f}", *words]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, env=ENVIRONMENT)


def adapt(inputs: Path, run_dir: Path, output: str = "text") -> list[object]:
    words = ["adapt", inputs / "checkpoint", "--cluster", "cpu-2", "--recipe", inputs / "recipe.yaml"]
    return [
        *words,
        "--headless",
        "--policy",
        inputs / "policy.yaml",
        "--run-dir",
        run_dir,
        "--output",
        output,
        "--preflight",
    ]


@pytest.fixture(scope="module")
def inputs(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("e2e") / "inputs"
    shutil.copytree(built, folder)
    shutil.copy(Path(__file__).parents[2] / "examples" / "tiny-moe" / "policy.yaml", folder)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["schedule"] |= {"steps": STEPS, "save_every_steps": 4}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(scope="module")
def unbroken(inputs: Path) -> Path:
    """A whole headless run."""
    run_dir = inputs.parent / "unbroken"
    done = run(*adapt(inputs, run_dir, "json"))
    assert done.returncode == 0, done.stderr[-4000:]
    (inputs.parent / "unbroken.json").write_text(done.stdout)
    return run_dir


def record(run_dir: Path) -> dict:
    return json.loads((run_dir / "run.json").read_bytes())


def steps_seen(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def test_a_headless_run_gives_a_proved_adapter(unbroken, inputs) -> None:
    told = json.loads((inputs.parent / "unbroken.json").read_text())
    before, after = told["held_out_loss"]["before"], told["held_out_loss"]["after"]
    assert after < before * 0.9, (before, after)
    assert {check["stage"] for check in told["checks"]} == {"load", "step", "export"}
    assert all(check["passed"] for check in told["checks"])
    adapter = Path(told["adapter"]["path"])
    assert (adapter / "adapter_model.safetensors").is_file() and (adapter / "adapter_config.json").is_file()
    assert record(unbroken)["status"] == "exported" and record(unbroken)["world_size"] == 2
    assert len(record(unbroken)["steps"]) == STEPS
    tests = {one["name"]: one["passed"] for one in record(unbroken)["preflight"]}
    assert {"versions", "memory", "disk", "clocks", "collectives-correct", "pair-bandwidth"} <= set(tests)
    assert all(tests[name] for name in ("versions", "memory", "disk", "collectives-correct"))
    assert "Preflight" in (unbroken / "report.md").read_text()
    report = (unbroken / "report.html").read_text()
    assert f"{before:.4f} → {after:.4f}" in report and "<svg" in report
    assert told["decision_sha256"] in (unbroken / "report.md").read_text()


def test_the_same_command_again_does_nothing_twice(cli, unbroken, inputs) -> None:
    before = {path: path.read_bytes() for path in unbroken.rglob("*.json*") if path.is_file()}
    done = cli(*adapt(inputs, unbroken, "junit"))
    assert done.code == 0, done.err
    suites = {suite.get("name"): suite for suite in ElementTree.fromstring(done.out)}
    assert set(suites) == {"certificates", "policy", "checks", "run"}
    assert all(suite.get("failures") == "0" for suite in suites.values())
    assert {path: path.read_bytes() for path in before} == before


def test_status_and_show_of_a_finished_run(cli, unbroken) -> None:
    status = json.loads(cli("status", unbroken, "--output", "json").out)
    assert status["state"] == "finished" and {node["state"] for node in status["nodes"]} == {"done"}
    assert status["step"] == status["steps"] == STEPS
    assert "| state | finished |" in cli("status", unbroken, "--output", "markdown").out
    assert "passed" in cli("show", unbroken).out
    assert "execute    finished" in cli("logs", unbroken).out
    assert f"step {STEPS}/{STEPS}" in cli("logs", unbroken, "--workers").out
    assert cli("show", unbroken, "--output", "markdown").out == (unbroken / "report.md").read_text()


def test_followed_logs_end_with_the_run(cli, unbroken) -> None:
    lines = cli("logs", unbroken, "--follow", "-n", 3).out.splitlines()
    assert len(lines) == 6, "three events, two steps and an evaluation"
    assert any("report     finished" in line for line in lines)
    assert any(line.startswith(f"step {STEPS:>5}  loss ") for line in lines)
    assert f"step {STEPS}/{STEPS}" in cli("logs", unbroken, "-f", "--workers").out


@pytest.mark.parametrize("form", ["peft", "per-expert", "merged"])
def test_every_form_of_the_adapter_is_written_and_proved(cli, unbroken, form) -> None:
    told = json.loads(cli("export", unbroken, "--format", form, "--output", "json").out)
    assert Path(told["path"]).is_dir() and told["tensors"] > 0
    assert form == "peft" or (told["checks"] and all(check["passed"] for check in told["checks"]))
    if form == "merged":
        assert told["retained_delta"] == pytest.approx(1.0, abs=1e-3), "nothing is packed here"
    if form == "per-expert":
        text = cli("export", unbroken, "--format", form).out
        assert "vllm serve" in text and "neither engine was started" in text


def start_and(
    interrupt: Callable[[subprocess.Popen[str]], None], words: list[object], run_dir: Path, at_step: int
) -> int:
    """Start a command, wait for a training step to be recorded, interrupt it, and return its exit status."""
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *command(*words)[4:]],  # a shell's background job inherits it as ignored
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    deadline = time.monotonic() + 120 * SLACK
    while steps_seen(run_dir) < at_step:
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    interrupt(process)
    told = process.communicate(timeout=60 * SLACK)[1]
    assert "Traceback" not in told, told[-3000:]
    return process.returncode


def test_killed_then_stopped_it_ends_as_the_unbroken_run(cli, unbroken, inputs) -> None:
    """SIGKILL of the driver in the middle of training, `shardwright cancel` later, then the same command."""
    run_dir = inputs.parent / "broken"
    words = adapt(inputs, run_dir)
    assert start_and(lambda p: p.kill(), words, run_dir, 6) == -signal.SIGKILL

    def cancel(process: subprocess.Popen[str]) -> None:
        done = cli("cancel", run_dir)
        assert done.code == 0 and done.out.strip() == str(run_dir), done.err
        assert f"`shardwright resume {run_dir}` goes on" in done.err

    assert start_and(cancel, words, run_dir, 10) == 130
    status = cli("status", run_dir)
    assert "interrupted" in status.out and f"resume {run_dir}" in status.out
    done = cli("resume", run_dir, "--headless", "--policy", inputs / "policy.yaml")
    assert done.code == 0, done.err[-4000:]
    ours, theirs = record(run_dir), record(unbroken)
    assert [step["step"] for step in ours["steps"]] == list(range(1, STEPS + 1))
    losses = [[step["loss"] for step in side["steps"]] for side in (ours, theirs)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-6)
    assert ours["resumed_from_steps"]
    assert (run_dir / "approvals.jsonl").read_text().count("\n") == 1
    mine, its = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (run_dir, unbroken))
    assert mine.keys() == its.keys()
    for name, value in mine.items():
        np.testing.assert_allclose(value, its[name], rtol=0, atol=1e-6)


@pytest.fixture
def approved(cli, unbroken: Path, inputs: Path, tmp_path: Path) -> Path:
    """The unbroken run's plan, approved by a person, beside a copy of its inputs."""
    folder = tmp_path / "approved"
    shutil.copytree(inputs, folder)
    shutil.copy(unbroken / "plan.json", folder / "plan.json")
    done = cli("review", folder / "plan.json", "--approve", "--actor", "ada")
    assert done.code == 0, done.err
    return folder


def poison(shard: Path) -> str:
    """Write one NaN over the first value of a shard's first tensor, header untouched; returns the tensor's name."""
    data = bytearray(shard.read_bytes())
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    name, entry = min(
        ((k, v) for k, v in header.items() if k != "__metadata__"), key=lambda item: item[1]["data_offsets"]
    )
    at = 8 + header_bytes + entry["data_offsets"][0]
    data[at : at + 4] = np.float32(np.nan).tobytes()
    shard.write_bytes(data)
    return name


def test_values_that_changed_after_the_plan_are_stale_and_named(cli, approved) -> None:
    """Headers do not change: the plan pins the values too."""
    shard = sorted((approved / "checkpoint").glob("*.safetensors"))[0]
    poison(shard)
    done = cli("apply", approved / "plan.json", "--checkpoint", approved / "checkpoint", "--run-dir", approved / "run")
    assert done.code == 5 and f"decision.weights.files[{shard.name}]" in done.err, done.err[-3000:]


def test_nan_weights_end_with_9_and_no_adapter(cli, inputs, approved) -> None:
    """Weights that are not finite when the plan is made are what it pins: the check after load must see them."""
    name = poison(sorted((approved / "checkpoint").glob("*.safetensors"))[0])
    run_dir, plan = approved / "run", approved / "of-nan.json"
    done = cli("plan", approved / "checkpoint", "-c", "cpu-2", "-r", approved / "recipe.yaml", "-o", plan)
    assert done.code == 0, done.err[-3000:]
    assert cli("review", plan, "--approve", "--actor", "ada").code == 0
    done = cli("apply", plan, "--checkpoint", approved / "checkpoint", "--run-dir", run_dir)
    assert done.code == 9, done.err[-3000:]
    assert name.rsplit(".", 2)[0] in done.err and "error: [check/" in done.err
    assert not (run_dir / "adapter").exists() and not (run_dir / "report.html").exists()


def test_a_changed_checkpoint_is_stale_and_named(cli, approved) -> None:
    path = approved / "checkpoint" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rms_norm_eps": 0.001}))
    done = cli("apply", approved / "plan.json", "--checkpoint", approved / "checkpoint", "--run-dir", approved / "run")
    assert done.code == 5, done.err[-3000:]
    assert "decision.checkpoint.config_sha256" in done.err
    assert not (approved / "run" / "run.json").exists()


def test_generate_shows_both_answers(cli, unbroken, inputs) -> None:
    done = cli("generate", inputs / "checkpoint", "--adapter", unbroken / "adapter", "--max-new-tokens", 12)
    assert done.code == 0, done.err
    prompt, base, adapter = (part.split("\n", 1)[1] for part in done.out.split("--- ")[1:])
    assert prompt == "the router \n"  # the recipe's
    assert base != adapter
