"""Parts of the script for several devices that need none: timelines, correlation, summaries, settings."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
multi_gpu = importlib.import_module("multi_gpu")
cases = importlib.import_module("multi_gpu_cases")
timeline = importlib.import_module("multi_gpu_timeline")
made = importlib.import_module("multi_gpu_lines")
started = importlib.import_module("multi_gpu_run")


def event(name: str, start: float, end: float, device: str = "DeviceType.CUDA") -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


def test_exposed_exchanges_are_those_beside_no_kernel() -> None:
    events = [
        event("ncclDevKernel_SendRecv", 0, 100),
        event("ncclDevKernel_SendRecv", 50, 150),
        event("gemm", 100, 130),
        event("gemm", 120, 140),
        event("ncclDevKernel_AllGather", 0, 150),
        event("aten::mm", 0, 150, "DeviceType.CPU"),
    ]
    whole, exposed = timeline.exposed_share(events, "cuda")
    assert whole == pytest.approx(0.150) and exposed == pytest.approx(0.110)
    assert timeline.exposed_share(events[2:4], "cuda") == (0, 0)


def test_rank_correlation() -> None:
    assert made.rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert made.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert made.rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert made.rank_correlation([1, 2], [5, 5]) == 0


@pytest.mark.parametrize("world", [2, 4, 8])
def test_settings_are_few_and_fill_the_world(world: int) -> None:
    found = cases.step_settings(world, ("qwen3-30b", "kimi-linear-48b"), False)
    for model in ("qwen3-30b", "kimi-linear-48b"):
        own = [one for one in found if one.model == model]
        assert 2 < len(own) <= 6
        assert {one.strategy.mesh.world_size for one in own} == {world}
    assert len({one.case for one in found}) == len(found)
    assert all(mesh.world_size == world for mesh in cases.meshes(world))


def test_measured_steps_meet_their_predictions() -> None:
    """Lines of two settings; measured numbers made from the predictions give a full correlation."""
    settings = cases.step_settings(2, ("qwen3-30b",), False)[:2]
    raw = []
    for one in settings:
        predicted = made.predict(one.case, 2, None)
        measured = {
            "step_ms": 2 * predicted["predicted_step_ms"],
            "tokens_per_s": predicted["predicted_tokens_per_s"] / 2,
            "peak_bytes": predicted["predicted_peak_bytes"] / 1.02,
        }
        raw.append({"kind": "steps", "case": one.case, "metrics": measured})
    lines = {line["case"]: line["metrics"] for line in made.lines_of(raw, 2, None, "multi-gpu")}
    assert lines["multi-gpu-2/memory"]["worst_abs_pct"] == pytest.approx(2, abs=0.01)
    assert lines["multi-gpu-2/time"]["mean_abs_pct"] == pytest.approx(50, abs=0.01)
    assert lines["multi-gpu-2/rank-correlation"] == {"value": 1.0, "points": 2.0, "choice_is_best": 1.0}


def test_a_wrong_gradient_is_named() -> None:
    raw = [{"kind": "parity", "case": "ep2/mixtral-float32-eager", "metrics": {"gradient_error": 1e-2}}]
    (line,) = made.lines_of(raw, 2, None, "multi-gpu")
    assert line["metrics"]["passed"] == 0.0


HOST_GIB = 139
"""Memory of one H200 that a process sees."""


@pytest.mark.parametrize("devices", [2, 4])
def test_every_step_is_predicted_to_fit(devices: int) -> None:
    """A setting that ends a rank costs minutes of a machine; the product's own model tells before."""
    for case, setting in cases.every_setting(devices).items():
        predicted = made.predict(case, devices, None)
        assert predicted["predicted_reserved_bytes"] < 0.95 * HOST_GIB * 2**30, case
        assert predicted["predicted_step_ms"] < 6000, case
        assert setting.strategy.mesh.world_size <= devices


def test_scaling_is_against_one_rank_and_a_part_that_is_whole_makes_no_line() -> None:
    def step(ranks: int, case: str, rate: float) -> dict[str, object]:
        return {"kind": "scaling", "case": case, "metrics": {"step_ms": 1.0, "tokens_per_s": rate, "ranks": ranks}}

    worlds = cases.scaling_worlds(4)
    assert worlds == (1, 2, 4) and cases.scaling_worlds(6) == (1, 2, 4)
    names = [[one.case for one in cases.scaling_settings(w, "qwen3-30b", False)] for w in worlds]
    raw = [step(1, names[0][0], 100.0), step(2, names[1][0], 180.0), step(4, names[2][1], 300.0)]
    whole = {"kind": "scaling", "case": made.COMPLETE, "metrics": {}}
    mended = {"kind": "scaling", "case": made.ENDED, "metrics": {"exit_code": 1.0}}
    lines = made.lines_of([mended, *raw, whole, raw[0]], 4, None, "multi-gpu")
    assert [round(line["metrics"]["efficiency"], 3) for line in lines] == [1.0, 0.9, 0.75]
    assert all(line["metrics"]["predicted_step_ms"] > 0 for line in lines)


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> argparse.Namespace:
    """Options with a script of the test's own in place of the ranks'; torchrun is left out."""
    script = tmp_path / "multi_gpu_rank.py"
    script.write_text("import json, os, sys, time\nwork = sys.argv[sys.argv.index('--work') + 1]\n" + body)
    monkeypatch.setattr(started, "HERE", tmp_path)
    monkeypatch.setattr(started, "launcher", lambda count: [sys.executable])
    return argparse.Namespace(models="qwen3-30b", calibration=tmp_path / "c.json", rehearse=True)


THREE_CASES = """
done = json.load(open(work + "/done.json"))
for case in ("a", "b", "c"):
    if case in done:
        continue
    print("BEGUN " + case, flush=True)
    if case == "b":
        os._exit(9)
    print("RESULT " + json.dumps({"kind": "steps", "case": case, "metrics": {}}), flush=True)
"""


def test_a_case_that_ends_its_ranks_is_named_and_the_rest_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, told = stand_in(tmp_path, monkeypatch, THREE_CASES), []
    started.ranks("steps", 2, given, tmp_path, 100.0, {"a"}, told.append)
    assert [one["case"] for one in told] == [made.ENDED, "b", "c"]
    assert told[0]["metrics"]["exit_code"] == 9 and told[1]["metrics"]["failed"] == 1
    assert made.wrong(told[0]) and made.wrong(told[1]) and not made.wrong(told[2])


def test_results_come_before_their_process_ends_and_a_limit_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = THREE_CASES.replace("os._exit(9)", "time.sleep(60)")
    given, told, began = stand_in(tmp_path, monkeypatch, body), [], time.monotonic()

    def tell(one: dict[str, object]) -> None:
        told.append((one["case"], time.monotonic() - began))

    started.ranks("steps", 2, given, tmp_path, 3.0, set(), tell)
    assert [case for case, _ in told] == ["a"]
    assert told[0][1] + 1 < time.monotonic() - began < 20


def test_earlier_results_are_kept_and_only_what_lacks_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a call that was killed while it wrote: its whole lines count, the cut one goes."""
    out, run = tmp_path / "raw.jsonl", []
    kept = [{"kind": "calibrate", "case": made.COMPLETE, "metrics": {}, "calibration": {"x": 1}, "devices": 4}]
    kept += [{"kind": "steps", "case": "a", "metrics": {}, "devices": 4}]
    out.write_text("".join(json.dumps(one) + "\n" for one in kept) + '{"kind": "steps", "ca')

    def stub(what: str, given: object, work: Path, limit_s: float, done: set[str], tell: object) -> None:
        run.append((what, done))
        tell({"kind": what, "case": made.COMPLETE, "metrics": {}})  # type: ignore[operator]

    monkeypatch.setattr(multi_gpu, "run", stub)
    words = ["all", "--devices", "4", "--rehearse", "--out", str(out), "--calibration", str(tmp_path / "c.json")]
    assert multi_gpu.main([*words, "--skip", "parity,faults,overlap"]) == 0
    assert run == [("scaling", set()), ("steps", {"a"})]
    assert json.loads((tmp_path / "c.json").read_text()) == {"x": 1}
    assert [json.loads(line)["case"] for line in out.read_text().splitlines()][2:] == [made.COMPLETE] * 2
    run.clear()
    assert multi_gpu.main([*words, "--limit-seconds", "1"]) == 2 and run == []


def test_a_rank_that_fails_leaves_at_once(tmp_path: Path) -> None:
    """It must not wait in the interpreter's shutdown for ranks that wait for it."""
    (tmp_path / "done.json").write_text("[]")
    words = [sys.executable, str(Path(multi_gpu.__file__).with_name("multi_gpu_rank.py")), "steps", "--rehearse"]
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [*words, "--models", "no-such-model", "--work", str(tmp_path)],
        env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1 and "no-such-model" in done.stderr
