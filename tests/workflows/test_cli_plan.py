"""Plans at the command line, made by the real agents on examples/tiny-moe."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jsonschema
import pytest
import yaml

from shardwright.schemas.plan import AdaptationPlan, load_plan
from shardwright.schemas.profile import WeightsPin
from shardwright.schemas.registry import schema_path
from shardwright.search_spaces.catalogue import load_cluster
from shardwright.workflows.cli.main import main
from shardwright.workflows.report.markdown import markdown_plan


@pytest.fixture(scope="session")
def planned(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of tiny-moe for cpu-2, made in this process."""
    out = tmp_path_factory.mktemp("planned") / "plan.json"
    arguments = ["plan", built / "checkpoint", "-c", "cpu-2", "-r", built / "recipe.yaml", "-o", out]
    arguments += ["--report", out.with_suffix(".html")]
    before, sys.argv = sys.argv, ["shardwright", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    assert not ended.value.code
    return out


def test_a_plan_is_written_with_its_report(planned) -> None:
    """The report names this plan's strategy and every decided fusion, and asks nothing of the network."""
    page = planned.with_suffix(".html").read_text(encoding="utf-8").replace(' xmlns="http://www.w3.org/2000/svg"', "")
    plan = load_plan(planned)
    assert plan.decision.strategy.text() in page and plan.hashes.decision[:12] in page
    assert "default-src 'none'" in page and "<script" not in page and "http://" not in page and "https://" not in page


def hub_module():
    """The hub on loopback of the tests of ``checkpoints``."""
    path = Path(__file__).parents[1] / "checkpoints" / "test_hub.py"
    spec = importlib.util.spec_from_file_location("hub_on_loopback", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_address_plans_what_its_copy_does_and_trains_nothing(planned, built, tmp_path) -> None:
    """``hf://`` by range reads: the plan of the folder but for the weights' values, which were not fetched.

    Training is refused until they are here.
    """
    hub = hub_module().Hub(built / "checkpoint")
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    unset = {"HF_HUB_OFFLINE": "", "HF_ENDPOINT": hub.endpoint, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    program = [sys.executable, "-m", "shardwright.workflows.cli.main"]

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in {**os.environ, **unset}.items() if v}
        command = [*program, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)

    try:
        out = tmp_path / "plan.json"
        done = run("plan", "hf://org/model", "-c", "cpu-2", "-r", built / "recipe.yaml", "-o", out)
        assert done.returncode == 0, done.stderr[-2000:]
        near, far = load_plan(planned), load_plan(out)
        assert far.decision.weights == WeightsPin() and near.decision.weights != WeightsPin()
        assert far.decision.model_copy(update={"weights": near.decision.weights}) == near.decision
        *words, told = far.evidence.explanation
        assert tuple(words) == near.evidence.explanation[:-1] and "headers alone" in told
        explained = {"explanation": near.evidence.explanation}
        assert far.evidence.model_copy(update=explained) == near.evidence
        sent = sum(hub.sent.values())
        assert sent <= sum(path.stat().st_size for path in (built / "checkpoint").iterdir())
    finally:
        hub.shutdown()
    assert run("review", out, "--approve").returncode == 0
    (folder,) = (tmp_path / "cache" / "shardwright" / "hub" / "org--model").iterdir()
    for name in (folder, "hf://org/model"):
        done = run("apply", out, "--checkpoint", name, "--data-root", built, "--run-dir", tmp_path / "run")
        assert done.returncode == 1 and "checkpoint/headers-only" in done.stderr
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.fixture
def plan_file(planned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(planned, tmp_path / "plan.json"))


def test_another_process_in_another_folder_plans_the_same_bytes(planned, built, tmp_path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(built, moved)
    command = [sys.executable, "-m", "shardwright.workflows.cli.main", "plan", "checkpoint", "-c", "cpu-2"]
    command += ["-r", "recipe.yaml", "-o", "out/plan.json"]
    subprocess.run(command, check=True, cwd=moved, capture_output=True, timeout=120)
    made = (moved / "out" / "plan.json").read_bytes()
    assert made == planned.read_bytes()
    assert str(built).encode() not in made and b"elsewhere" not in made
    assert markdown_plan(load_plan(moved / "out" / "plan.json")) == markdown_plan(load_plan(planned))
    assert [path.name for path in (moved / "out").iterdir()] == ["plan.json"]


def test_the_plan_is_whole(planned) -> None:
    plan = load_plan(planned)
    jsonschema.validate(json.loads(planned.read_bytes()), json.loads(schema_path(AdaptationPlan).read_text()))
    assert plan.decision.strategy.mesh.world_size == 2
    assert plan.decision.strategy.global_batch_sequences() == 4
    assert {target.role for target in plan.decision.lora_targets} == {"attention", "experts"}
    assert {"rms_norm", "add_rms_norm", "swiglu", "experts", "linear_cross_entropy"} <= {
        proposal.pattern for proposal in plan.evidence.proposals
    }
    legal = {proposal.id for proposal in plan.evidence.proposals if proposal.certificate.legal}
    assert {fusion.proposal_id for fusion in plan.decision.fusions if fusion.provider != "eager"} <= legal
    # tiny-moe: V·H twice, 2 layers of attention 12,288, experts 4·3·96·64, router 4·64, two norms of 64; a last norm.
    assert plan.evidence.profile.parameters.total == 2 * 264 * 64 + 2 * (12288 + 73728 + 256 + 128) + 64


def test_show_in_every_form(cli, plan_file) -> None:
    assert cli("show", plan_file, "--json").out == plan_file.read_text()
    assert cli("show", plan_file, "--output", "markdown").out == markdown_plan(load_plan(plan_file))
    assert load_plan(plan_file).hashes.decision in cli("show", plan_file).out
    assert json.loads(cli("show", "--schema", "Policy").out)["title"] == "Policy"


def test_explain(cli, plan_file) -> None:
    plan = load_plan(plan_file)
    proposal = plan.evidence.proposals[0]
    for subject, needed in (
        (proposal.id, proposal.certificate.obligations[0].evidence[:30]),
        ("memory", "frozen_base"),
        ("time", plan.evidence.cost.time.bound_by),
        ("strategy", "ALTERNATIVES"),
        ("fusions", "attention+moe"),
    ):
        done = cli("explain", plan_file, subject)
        assert done.code == 0 and needed in done.out, subject
        assert "| --- |" not in done.out and "| --- |" in cli("explain", plan_file, subject, "--output", "markdown").out
    assert cli("explain", plan_file, "nothing").code == 2


def test_review_shows_edits_and_approves(cli, plan_file) -> None:
    parent = load_plan(plan_file)
    shown = cli("review", plan_file)
    assert shown.code == 3 and "waits for a verdict" in shown.out and parent.hashes.decision in shown.out
    done = cli(
        "review", plan_file, "--edit", "mesh.ep=2", "--edit", "mesh.shard=1", "--reason", "try ep", "--actor", "ada"
    )
    assert done.code == 3 and "child plan" in done.err
    child = load_plan(plan_file)
    assert child.decision.strategy.mesh.ep == 2 and child.decision.parent_hash == parent.hashes.decision
    assert child.evidence.cost.time.step_ms != parent.evidence.cost.time.step_ms
    fusion = child.decision.fusions[0].proposal_id
    assert cli("review", plan_file, "--reject", fusion).code == 2  # no reason given
    assert cli("review", plan_file, "--reject", fusion, "--reason", "not yet", "--actor", "ada").code == 3
    rejected = [f.proposal_id for f in load_plan(plan_file).decision.fusions if f.rejected]
    assert rejected == [fusion]
    approved = cli("review", plan_file, "--approve", "--actor", "ada")
    assert approved.code == 0 and "approved by ada" in approved.out
    assert cli("review", plan_file, "--approve", "--reject-plan").code == 2
    kept = sorted((plan_file.parent / "plans").iterdir())
    assert len(kept) == 3
    old = next(path for path in kept if load_plan(path).hashes == parent.hashes)
    changed = cli("diff", old, plan_file)
    assert "decision.strategy.mesh.ep" in changed.out and "1 → 2" in changed.out


def test_an_illegal_edit_names_the_nearest_legal(cli, plan_file) -> None:
    before = plan_file.read_bytes()
    done = cli("review", plan_file, "--edit", "mesh.ep=3", "--reason", "odd")
    assert done.code == 6 and "nearest legal" in done.err
    assert plan_file.read_bytes() == before


def test_a_hand_edited_plan_is_stale_everywhere(cli, plan_file, built) -> None:
    plan_file.write_text(plan_file.read_text().replace('"micro_batch_sequences": 2', '"micro_batch_sequences": 1', 1))
    for command in (
        ("show", plan_file),
        ("review", plan_file, "--approve"),
        ("apply", plan_file, "--checkpoint", built / "checkpoint"),
        ("explain", plan_file),
        ("diff", plan_file, plan_file),
    ):
        done = cli(*command)
        assert done.code == 5 and "plan/decision-edited" in done.err, command


def test_apply_refuses_what_is_not_approved(cli, plan_file, built, tmp_path) -> None:
    apply = ("apply", plan_file, "--checkpoint", built / "checkpoint", "--run-dir", tmp_path / "run")
    done = cli(*apply)
    assert done.code == 3 and "approval/needs-approval" in done.err
    assert cli("review", plan_file, "--reject-plan", "--reason", "too slow").code == 3
    done = cli(*apply)
    assert done.code == 3 and "too slow" in done.err
    assert not (tmp_path / "run").exists()


def test_apply_refuses_changed_data(cli, plan_file, tiny) -> None:
    assert cli("review", plan_file, "--approve", "--actor", "ada").code == 0
    with open(tiny / "train.jsonl", "a") as stream:
        stream.write('{"text": "one more"}\n')
    done = cli("apply", plan_file, "--checkpoint", tiny / "checkpoint", "--run-dir", tiny / "run")
    assert done.code == 5 and "stale/data" in done.err and "train.jsonl" in done.err
    assert not (tiny / "run").exists()


def test_a_cluster_too_small_is_infeasible(cli, tiny) -> None:
    raw = load_cluster("cpu-2").model_dump(mode="json")
    raw["device"] |= {"memory_bytes": 200_000_000, "usable_memory_bytes": 200_000_000}
    (tiny / "small.yaml").write_text(yaml.safe_dump({**raw, "name": "small"}))
    out = tiny / "plan.json"
    done = cli("plan", tiny / "checkpoint", "-c", tiny / "small.yaml", "-r", tiny / "recipe.yaml", "-o", out)
    assert done.code == 7 and "error: [infeasible/" in done.err and not out.exists()


def test_inspect_counts_from_headers(cli, built) -> None:
    found = json.loads(cli("inspect", built / "checkpoint", "--output", "json").out)
    assert found["parameters"]["by_component"]["routed_experts"] == 2 * 4 * 3 * 96 * 64
    assert "206,656" in cli("inspect", built / "checkpoint").out
    assert "| routed_experts | 147,456 |" in cli("inspect", built / "checkpoint", "--output", "markdown").out


def test_cluster_files_are_written_and_load(cli, tmp_path) -> None:
    assert cli("cluster", "init", tmp_path, "--ranks", "2").code == 0
    spec = load_cluster(str(tmp_path / "cluster.yaml"))
    assert spec.world_size == 2 and "assumed" in " ".join(spec.device.sources.values())
    assert cli("cluster", "init", tmp_path).code == 2  # would overwrite
    (tmp_path / "cluster.yaml").unlink()
    assert cli("cluster", "init", tmp_path).code == 2 and not (tmp_path / "cluster.yaml").exists()
    assert "devices_per_node" in cli("cluster", "detect").out


def test_doctor_says_what_is_there_and_what_a_gap_means(cli) -> None:
    found = {item["name"]: item for item in json.loads(cli("doctor", "--output", "json").out)}
    assert found["torch"]["status"] == "ok" and found["gloo"]["status"] == "ok"
    assert {"python", "cpu", "nccl", "triton", "c++", "memory", "disk"} <= set(found)
    assert all(item["effect"] for item in found.values())


def test_adapt_pauses_then_a_policy_denies_it(cli, tiny) -> None:
    """Exit codes 3 and 4 on one run: nothing is planned twice, nothing is executed."""
    run_dir = tiny / "run"
    words = ["adapt", tiny / "checkpoint", "-c", "cpu-2", "-r", tiny / "recipe.yaml", "--run-dir", run_dir]
    paused = cli(*words)
    assert paused.code == 3 and "approval/needs-approval" in paused.err
    status = json.loads(cli("status", run_dir, "--output", "json").out)
    assert status["state"] == "paused" and "shardwright review" in status["next_command"]
    (tiny / "policy.yaml").write_text("allow_providers: [shardwright]\napprove: true\n")
    denied = cli(*words, "--headless", "--policy", tiny / "policy.yaml", "--output", "json")
    assert denied.code == 4
    error = json.loads(denied.out)["error"]
    assert error["code"] == "policy/violated" and "not allowed: eager" in error["what"]
    assert "structure" not in denied.err and not (run_dir / "run.json").exists()
    assert not (run_dir / "approvals.jsonl").exists()


def test_a_simulated_rank_keeps_what_the_plan_says(plan_file, built) -> None:
    """In a process of its own: it joins a fake process group."""
    program = [sys.executable, "-m", "shardwright.workflows.cli.main", "simulate", str(plan_file)]
    words = ["--checkpoint", str(built / "checkpoint"), "--simulate-world"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = ["timeout", "-k", "5", "200", *program, *words, *more]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run("2", "--output", "json")
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["world"] == 2 and told["kept_bytes"] == pytest.approx(told["predicted"]["kept"], rel=0.02)
    done = run("64")
    assert done.returncode == 2 and "the plan is for 2 ranks, --simulate-world asks for 64" in done.stderr
