"""The user's own measured times: what `kernels bench` writes, what `plan` and `adapt` refuse, keep, believe, tell."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import workflow_fakes as fakes

from shardwright.kernels.evidence import EvidenceStore
from shardwright.kernels.registry import source_sha256
from shardwright.schemas.errors import RunError, UsageError
from shardwright.schemas.ops import MeasuredTime
from shardwright.schemas.plan import EvidenceFile, load_plan
from shardwright.workflows import evidence as own
from shardwright.workflows.drive import drive
from shardwright.workflows.explaining import explanation
from shardwright.workflows.prepare import fresh_request
from shardwright.workflows.report.html import html_plan
from shardwright.workflows.report.markdown import markdown_plan, render
from shardwright.workflows.request import Request, default_run_dir

OTHER_SOURCE = "0" * 64


def time(**changes: object) -> MeasuredTime:
    facts: dict[str, object] = {
        "op": "rms_norm",
        "provider": "shardwright",
        "pass_name": "fwd+dx",
        "device": "CPU",
        "driver": "",
        "versions": {},
        "source_sha256": changes.get("source_sha256") or source_sha256(str(changes.get("op", "rms_norm"))),
        "shape_bucket": "H64,T64",
        "dtype": "float32",
        "median_ms": 0.5,
        "floor_ms": 0.1,
        "peak_bytes": 0,
        "repeats": 7,
        "date": "2026-01-01",
    }
    return MeasuredTime.model_validate({**facts, **changes})


def written(path: Path, *times: MeasuredTime) -> Path:
    EvidenceStore(path).add(times)
    return path


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Two times that count, one that replaced an older, two of an operator that has changed, one of another device."""
    return written(
        tmp_path / "mine.jsonl",
        time(),
        time(provider="eager"),
        time(source_sha256=OTHER_SOURCE),
        time(op="router", source_sha256=OTHER_SOURCE),
        time(op="router", provider="eager", source_sha256=OTHER_SOURCE),
        time(device="Other GPU"),
    )


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def requested(inputs: Path, *files: Path, tell: Callable[[str], None] = lambda words: None) -> Request:
    where = (inputs / "checkpoint", "fake-2", inputs / "recipe.yaml")
    return fresh_request("adapt", *where, 4, fakes.fake_stages(), evidence=list(files), tell=tell)


GOOD = time(device="cpu-rank").model_dump_json()


@pytest.mark.parametrize("verb", ["plan", "adapt"])
@pytest.mark.parametrize(
    ("content", "code", "where", "said"),
    [
        (None, "missing", "mine.jsonl", "no such file"),
        ("", "not-evidence", "mine.jsonl", "holds no measured time"),
        (f"{GOOD}\n\n{{}}\n", "not-evidence", "mine.jsonl:3", "op: Field required"),
        (f"{GOOD}\nno JSON\n", "not-evidence", "mine.jsonl:2", "Invalid JSON"),
        (b"\xff\xfe", "not-evidence", "mine.jsonl", "not UTF-8 text: byte 0xff at offset 0"),
        (time(device="Other GPU").model_dump_json(), "other-device", "mine.jsonl", "no time of cpu-rank"),
    ],
    ids=["absent", "empty", "wrong-line", "no-json", "binary", "other-device"],
)
def test_a_file_that_cannot_be_used_ends_the_command_at_once(
    cli, tiny: Path, monkeypatch: pytest.MonkeyPatch, verb: str, content: str | bytes | None, code: str, where: str,
    said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tiny)
    if content is not None:
        Path("mine.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    done = cli(verb, "checkpoint", "-c", "cpu-2", "-r", "recipe.yaml", "--evidence", "mine.jsonl")
    assert (done.code, done.out) == (2, "")
    assert f"error: [usage/{code}]" in done.err and said in done.err and f"where: {where}\n" in done.err
    assert "kernels bench" in done.err.split("next:")[1]
    assert not Path("plan.json").exists() and not Path("runs").exists()


def test_a_folder_and_the_same_times_twice_are_refused(inputs: Path, mine: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not-a-file"):
        requested(inputs, tmp_path)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(mine.read_bytes())
    with pytest.raises(UsageError, match="named-twice"):
        requested(inputs, mine, copy)


def test_one_file_a_device_may_be_named_together(inputs: Path, mine: Path, tmp_path: Path) -> None:
    gpu = written(tmp_path / "gpu.jsonl", time(device="Other GPU"))
    with pytest.raises(UsageError, match="other-device") as caught:
        requested(inputs, gpu)
    assert "measured there: Other GPU" in caught.value.what and "kernels bench" in caught.value.next_action
    assert [pin.sha256 for pin in requested(inputs, gpu, mine).evidence] == [sha256(gpu), sha256(mine)]


def test_what_counts_is_told_at_once_and_what_does_not_by_its_lines(inputs: Path, mine: Path) -> None:
    told: list[str] = []
    requested(inputs, mine, tell=told.append)
    lines = [json.loads(line) for line in mine.read_text().splitlines()]
    numbers = [str(n) for n, line in enumerate(lines, start=1) if line["op"] == "router"]
    assert told[0] == f"--evidence {mine} ({sha256(mine)[:16]}…): 2 times of CPU"
    assert told[1].startswith(f"  ignored: lines {', '.join(numbers)}: router was measured with other sources")
    assert told[1].endswith(f"`shardwright kernels bench router --evidence {mine}`")
    assert told[2:] == ["  ignored: 1 time of Other GPU"]


def test_an_operator_that_is_not_installed_is_ignored_like_a_changed_one(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.jsonl", time(), time(op="gone", source_sha256=OTHER_SOURCE))
    judged = own.judge(path.read_bytes(), "CPU", where="mine.jsonl")
    assert judged.file == EvidenceFile(sha256=sha256(path), times=1, stale={"gone": 1})
    (line,) = [number for number, text in enumerate(path.read_text().splitlines(), start=1) if '"gone"' in text]
    assert own.words(path, judged, "CPU")[1:] == (f"  ignored: line {line}: no operator gone is installed here",)


def test_a_file_of_stale_times_alone_is_no_error_but_a_decision_that_is_told(inputs: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "mine.jsonl", time(source_sha256=OTHER_SOURCE))
    told: list[str] = []
    assert requested(inputs, path, tell=told.append).evidence
    assert "0 times of CPU" in told[0] and "line 1: rms_norm" in told[1]


def ranked(seen: list[tuple[object, ...]]) -> Callable[..., fakes.Structured]:
    """Structure parsing whose fusions were ranked by the files that it got."""

    def structure(*given: object) -> fakes.Structured:
        seen.append(given)
        files = tuple(sha256(path) for path in given[4]) if len(given) > 4 else ()  # type: ignore[attr-defined]
        found = fakes.structured()
        proposals = tuple(
            p.model_copy(
                update={
                    "variants": tuple(
                        v.model_copy(
                            update={
                                "gain": v.gain
                                and v.gain.model_copy(
                                    update={"evidence": files, "basis": f"evidence file {files[0][:16]}…"}
                                    if files
                                    else {}
                                )
                            }
                        )
                        for v in p.variants
                    )
                }
            )
            for p in found.proposals
        )
        return fakes.Structured(found.graph, proposals)

    return structure


def test_a_plan_names_by_hash_what_it_believed_and_every_report_says_so(
    inputs: Path, mine: Path, tmp_path: Path, approving
) -> None:
    seen: list[tuple[object, ...]] = []
    stages = fakes.fake_stages(structure=ranked(seen))
    done = drive(requested(inputs, mine), tmp_path / "run", stages=stages, policy=approving)
    (file,) = done.plan.evidence.provenance.evidence_files
    assert file == EvidenceFile(sha256=sha256(mine), times=2, stale={"router": 2}, elsewhere=1)
    (kept,) = seen[0][4]  # type: ignore[misc]
    assert kept.read_bytes() == mine.read_bytes() and kept.parent == tmp_path / "run" / "artifacts"
    sentence = (
        f"Evidence file {sha256(mine)[:16]}…: 2 times of CPU believed, which rank 2 proposals; "
        "ignored: 2 of router, measured with other sources; 1 of other devices."
    )
    plan = load_plan(tmp_path / "run" / "plan.json")
    whole = (tmp_path / "run" / "report.html").read_text()
    texts = (markdown_plan(plan), html_plan(plan), render(explanation(plan, None)), whole)
    assert all(sentence in text for text in texts)
    assert sha256(mine) in html_plan(plan) and sha256(mine) in markdown_plan(plan)
    source = f"evidence file {sha256(mine)[:16]}…"
    assert source in render(explanation(plan, "fusions")) and source in render(explanation(plan, "norm.good"))


def test_times_that_fit_no_region_are_told(inputs: Path, mine: Path, tmp_path: Path, approving) -> None:
    done = drive(requested(inputs, mine), tmp_path / "run", stages=fakes.fake_stages(), policy=approving)
    assert "none of them at a size and format of this model" in " ".join(done.plan.evidence.explanation)


def test_without_own_times_request_plan_and_folder_are_what_they_were(inputs: Path, mine: Path, request_of) -> None:
    plain = requested(inputs)
    assert plain == request_of() and "evidence" not in plain.model_dump(mode="json")
    assert default_run_dir(requested(inputs, mine)) != default_run_dir(plain)


def test_a_run_keeps_its_times_when_the_file_goes_on_growing(
    inputs: Path, mine: Path, tmp_path: Path, approving
) -> None:
    request, run = requested(inputs, mine), tmp_path / "run"
    first = sha256(mine)

    def unsettled(*given: object) -> fakes.Structured:
        raise RunError("lost", "structure was lost", where="here", next_action="again")

    with pytest.raises(RunError, match="lost"):
        drive(request, run, stages=fakes.fake_stages(structure=unsettled))
    written(mine, time(provider="compile"))
    done = drive(request, run, stages=fakes.fake_stages(), policy=approving)
    assert [file.sha256 for file in done.plan.evidence.provenance.evidence_files] == [first] != [sha256(mine)]
    with pytest.raises(RunError, match="changed-input"):
        drive(request, tmp_path / "second", stages=fakes.fake_stages(), policy=approving)


def test_other_times_mean_that_structure_is_ranked_again(
    inputs: Path, mine: Path, tmp_path: Path, approving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash is part of the node's key: nothing that was ranked by other times is taken from the cache."""
    from shardwright.workflows.cache import NodeCache

    seen: list[tuple[object, ...]] = []
    stages, cache = fakes.fake_stages(structure=ranked(seen)), NodeCache(tmp_path / "cache")
    for name, files in (("a", ()), ("b", (mine,)), ("c", (mine,)), ("d", ())):
        drive(requested(inputs, *files), tmp_path / name, stages=stages, policy=approving, cache=cache)
    assert [len(given) for given in seen] == [4, 5]
    drive(requested(inputs, written(mine, time(op="router"))), tmp_path / "e", stages=stages, cache=cache,
          policy=approving)  # fmt: skip
    assert len(seen) == 3


def test_the_review_page_says_where_times_come_from(inputs: Path, mine: Path, tmp_path: Path, approving) -> None:
    pytest.importorskip("fastapi", reason="the review page needs the extra `review`")
    from fastapi.testclient import TestClient

    from shardwright.workflows.review.app import ReviewServer, build_app
    from shardwright.workflows.review.guard import Guard
    from shardwright.workflows.review.session import ReviewSession

    stages = fakes.fake_stages(structure=ranked([]))
    drive(requested(inputs, mine), tmp_path / "run", stages=stages, policy=approving)
    session = ReviewSession.open(tmp_path / "run" / "plan.json", actor="ada", stages=stages)
    server = ReviewServer(session, Guard(8123), None, "")
    client = TestClient(build_app(server), base_url="http://127.0.0.1:8123")
    page = client.get("/open", params={"token": server.guard.token}).text
    assert f"Evidence file {sha256(mine)[:16]}…: 2 times of CPU" in page
    assert page.count(f"evidence file {sha256(mine)[:16]}…") >= 2, "in the cards, beside each way's time"
    session.edit({"micro_batch_sequences": "2"}, "what if")
    assert session.plan.evidence.provenance.evidence_files[0].sha256 == sha256(mine)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A CUDA device on which `router` is wrong; what was verified and timed there."""
    import torch

    from shardwright.kernels import bench, verify_jobs
    from shardwright.schemas.bench import BenchLine

    happened: list[object] = []

    def timed(ops, out, evidence, *, cases, report):  # type: ignore[no-untyped-def]
        happened.append(("timed", None if ops is None else tuple(ops), evidence))
        facts = {"bench": "kernels", "case": "rmsnorm/x", "passes": "fwd", "ours": 1.0, "device": "GPU"}
        return [BenchLine.model_validate({**facts, "versions": {}, "commit": "c", "date": "2026-01-01"})]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(verify_jobs, "verify_in_jobs", fakes.verified_but_router(happened))
    monkeypatch.setattr(bench, "bench_all", timed)
    return happened


def test_times_become_evidence_only_of_operators_that_are_right_on_the_device(cli, device, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    done = cli("kernels", "bench", "rms_norm", "router", "--evidence", path, "-o", tmp_path)
    assert device == [("verified", ("rms_norm", "router")), ("timed", ("rms_norm",), path)]
    assert done.code == 9 and "check/kernel-wrong" in done.err and "kernels verify router" in done.err
    assert "rmsnorm/x" in done.out and f"--evidence {path}" in done.err


def test_only_operators_with_a_case_to_time_are_verified(cli, device, tmp_path: Path) -> None:
    done = cli("kernels", "bench", "--case", "rmsnorm/", "--evidence", tmp_path / "mine.jsonl", "-o", tmp_path)
    assert done.code == 0 and device[0] == ("verified", ("rms_norm",)) and device[1][1] == ("rms_norm",)


def test_nothing_is_timed_where_all_is_wrong_and_nothing_verified_without_evidence(cli, device, tmp_path: Path) -> None:
    done = cli("kernels", "bench", "router", "--evidence", tmp_path / "mine.jsonl", "-o", tmp_path)
    assert done.code == 9 and device == [("verified", ("router",))] and done.out == ""
    device.clear()
    assert cli("kernels", "bench", "router", "-o", tmp_path).code == 0
    assert device == [("timed", ("router",), None)]


def test_a_file_that_times_cannot_be_added_to_is_told_before_the_work(cli, device, tmp_path: Path) -> None:
    path = written(tmp_path / "mine.jsonl", time())
    path.write_text(path.read_text() + "no JSON\n")
    done = cli("kernels", "bench", "rms_norm", "--evidence", path, "-o", tmp_path)
    assert done.code == 2 and f"where: {path}:2" in done.err and device == []
    path.write_text("")
    assert cli("kernels", "bench", "rms_norm", "--evidence", path, "-o", tmp_path).code == 0


def test_choices_tuned_into_a_file_of_ones_own_come_with_the_place_where_workers_read_them(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright.kernels import tuned
    from shardwright.schemas.tuned import TunedFile
    from shardwright.workflows import operators

    monkeypatch.setattr(
        operators, "tune_operators", lambda *given: TunedFile(device="Some GPU", versions={}, entries=())
    )
    out = tmp_path / "mine.json"
    done = cli("kernels", "tune", "rms_norm", "-o", out)
    assert done.code == 0 and f"workers read {tuned.FOLDER / 'some-gpu.json'}: put {out} there" in done.err
    assert "workers read" not in cli("kernels", "tune", "rms_norm").err
