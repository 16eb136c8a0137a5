"""A checkpoint's own modelling code: never run unasked, only with the hash that was named, and in its own processes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shardwright.checkpoints.build import build_on_meta
from shardwright.checkpoints.remote_code import in_own_process, is_trusted, read_code, remote_class, trust
from shardwright.checkpoints.targets import parameter_shapes
from shardwright.runtime.verify import verify_plan_against_world
from shardwright.schemas.approval import Approval, ProposalVerdict, append_to_log, proposals_to_decide
from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.errors import CheckpointError, StalePlanError, UsageError
from shardwright.schemas.policy import Policy
from shardwright.workflows.drive import drive
from shardwright.workflows.policy import evaluate
from shardwright.workflows.prepare import fresh_request
from shardwright.workflows.remote_code import isolated
from shardwright.workflows.report.plan_content import pins_section
from shardwright.workflows.review.terminal import plan_text
from shardwright.workflows.stages import Stages

CONFIGURATION = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "tiny_own"
"""
MODELLING = """
import os
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

with open(os.environ["OWN_CODE_RAN"], "a") as stream:
    stream.write(f"{os.getpid()}\\n")

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
SIZES: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False, "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes that have imported the code, a line each."""
    path = tmp_path / "ran"
    path.write_text("")
    monkeypatch.setenv("OWN_CODE_RAN", str(path))
    return path


@pytest.fixture
def own(tmp_path: Path, built: Path) -> Path:
    """A checkpoint that only its own code can build."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "checkpoint"
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_bytes())
    config |= {
        "model_type": "tiny_own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELLING)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(built / "checkpoint" / name, folder / name)
    for name in ("train.jsonl", "held_out.jsonl"):
        shutil.copy(built / name, tmp_path / name)
    recipe = {
        "name": "own",
        "lora": {"targets": ["attention"], "rank": 4, "alpha": "8"},
        "data": {"train": "train.jsonl", "held_out": "held_out.jsonl"},
        "batch": {"sequence_tokens": 32, "global_batch_sequences": 4},
        "schedule": {"steps": 2, "held_out_sequences": 2},
        "precision": {"base": "float32"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def test_nothing_runs_without_the_hash_and_the_refusal_names_it(own: Path, ran: Path) -> None:
    code, files = read_code(own)
    assert set(files) == {"configuration_own.py", "modeling_own.py"} and code.sha256 == sha256_of(code.files)
    with pytest.raises(CheckpointError, match="unknown-architecture") as caught:
        build_on_meta(own, torch.float32)
    assert code.sha256 in caught.value.next_action and "2 files" in caught.value.what
    with pytest.raises(CheckpointError, match="remote-code-untrusted"):
        remote_class(own, {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}, "AutoModelForCausalLM")
    assert not is_trusted(own) and ran.read_text() == ""


@pytest.mark.parametrize("change", ["edited", "added", "removed", "below"])
def test_any_change_of_the_code_is_another_hash(change: str, own: Path, ran: Path) -> None:
    sha256 = read_code(own)[0].sha256
    if change == "edited":
        (own / "modeling_own.py").write_text(MODELLING + "\n")
    elif change == "removed":
        (own / "configuration_own.py").unlink()
    else:
        extra = own / ("kernels/extra.py" if change == "below" else "extra.py")
        extra.parent.mkdir(exist_ok=True)
        extra.write_text("")
    found = read_code(own)[0].sha256
    assert found != sha256
    with pytest.raises(CheckpointError, match="remote-code-changed") as caught:
        trust(own, sha256)
    assert found in caught.value.what and sha256 in caught.value.what
    assert ran.read_text() == "" and not is_trusted(own)


def test_code_of_another_repository_is_refused_and_broken_code_is_named(own: Path, ran: Path) -> None:
    config = json.loads((own / "config.json").read_bytes())
    elsewhere = {**config["auto_map"], "AutoModelForCausalLM": "someone/repo--modeling_own.OwnForCausalLM"}
    (own / "config.json").write_text(json.dumps({**config, "auto_map": elsewhere}))
    with pytest.raises(CheckpointError, match="remote-code-elsewhere"):
        in_own_process(own, read_code(own)[0].sha256, build_on_meta, own, torch.float32)
    (own / "config.json").write_text(json.dumps(config))
    (own / "modeling_own.py").write_text("import a_library_that_is_not_there")
    with pytest.raises(CheckpointError, match="remote-code-failed"):
        in_own_process(own, read_code(own)[0].sha256, build_on_meta, own, torch.float32)


def test_no_copy_of_the_code_is_left_behind(own: Path, ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = own.parent / "copies"
    copies.mkdir()
    monkeypatch.setenv("TMPDIR", str(copies))
    assert "lm_head.weight" in in_own_process(own, read_code(own)[0].sha256, parameter_shapes, own)
    assert len(ran.read_text().split()) == 1 and not list(copies.glob("shardwright-code-*"))


def test_a_model_that_transformers_knows_needs_no_trust(built: Path, tmp_path: Path, own: Path) -> None:
    folder = tmp_path / "known"
    shutil.copytree(built / "checkpoint", folder)
    (folder / "modeling_x.py").write_text("raise SystemExit")
    with pytest.raises(UsageError, match="trust-not-needed"):
        fresh_request(
            "plan", folder, "cpu-2", tmp_path / "recipe.yaml", 4, trust_remote_code=read_code(folder)[0].sha256
        )
    with pytest.raises(CheckpointError, match="remote-code-changed"):
        fresh_request("plan", own, "cpu-2", tmp_path / "recipe.yaml", 4, trust_remote_code="0" * 64)


def test_the_command_line_asks_for_the_hash(own: Path, ran: Path, tmp_path: Path, cli: Any) -> None:
    words = [
        "plan",
        str(own),
        "--cluster",
        "cpu-2",
        "--recipe",
        str(tmp_path / "recipe.yaml"),
        "-o",
        str(tmp_path / "p"),
    ]
    done = cli(*words, "--trust-remote-code", "1" * 64)
    assert done.code == 1 and "remote-code-changed" in done.err and read_code(own)[0].sha256 in done.err
    done = cli(*words)
    assert done.code == 1 and "unknown-architecture" in done.err and read_code(own)[0].sha256 in done.err
    assert ran.read_text() == ""


@pytest.mark.slow
def test_planned_pinned_verified_trained_and_exported(own: Path, ran: Path, tmp_path: Path) -> None:
    """This process plans, verifies, launches, exports and checks without importing the code once."""
    sha256 = read_code(own)[0].sha256
    recipe = tmp_path / "recipe.yaml"
    request = fresh_request("plan", own, "cpu-2", recipe, 4, trust_remote_code=sha256)
    plan = drive(request, tmp_path / "planned").plan
    code = plan.decision.remote_code
    assert code is not None and code.sha256 == sha256 and set(code.files) == {"configuration_own.py", "modeling_own.py"}
    assert "modeling_own.py" in plan_text(plan) and sha256 in plan_text(plan, 200)
    assert sha256 in str(pins_section(plan)) and plan.decision.architecture == "OwnForCausalLM"
    denied = [one for one in evaluate(plan, Policy()).findings if one.denies]
    assert [one.rule for one in denied] == ["allow_remote_code"] and sha256 in denied[0].found
    allowed = evaluate(plan, Policy(allow_remote_code=True)).findings
    assert all(one.rule != "allow_remote_code" for one in allowed)

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    plan.save(run_dir / "plan.json")
    approval = Approval.seal(
        decision_sha256=plan.hashes.decision,
        evidence_sha256=plan.hashes.evidence,
        verdict="approve",
        proposals=tuple(ProposalVerdict(proposal_id=one) for one in proposals_to_decide(plan)),
        actor="tests",
        actor_kind="person",
        time="2026-01-01T00:00:00Z",
    )
    append_to_log(run_dir / "approvals.jsonl", approval)
    stages = isolated(Stages(), own, sha256)
    stages.verify(plan, own, tmp_path)
    assert stages.launch(run_dir / "plan.json", own, tmp_path, run_dir / "approvals.jsonl", run_dir) == 0
    stages.export(run_dir, own)
    assert all(check.passed for check in stages.check_adapter(run_dir, own))
    processes = {int(line) for line in ran.read_text().split()}
    assert processes and os.getpid() not in processes and not is_trusted(own)
    assert not [name for name in sys.modules if name.startswith("shardwright_remote_")]

    (own / "modeling_own.py").write_text(MODELLING + "# changed\n")
    (own / "extra.py").write_text("")
    before = ran.read_text()
    with pytest.raises(StalePlanError) as caught:
        verify_plan_against_world(plan, own, tmp_path)
    assert "remote_code.files[modeling_own.py]" in caught.value.what
    assert "remote_code.files[extra.py]: the plan says no such file" in caught.value.what
    assert ran.read_text() == before, "a changed file is found before it is imported"
