"""Makes ``workflow_fakes`` importable, and gives a folder of inputs with a finished fake run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

os.environ["SHARDWRIGHT_CACHE"] = "off"  # every test does its own work; the cache has tests of its own

import workflow_fakes as fakes

from shardwright.schemas.policy import Policy
from shardwright.workflows.drive import Outcome, drive
from shardwright.workflows.prepare import fresh_request
from shardwright.workflows.request import Request


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "inputs"
    fakes.make_inputs(folder)
    return folder


@pytest.fixture
def request_of(inputs: Path):
    def make(goal: str = "adapt") -> Request:
        return fresh_request(goal, inputs / "checkpoint", "fake-2", inputs / "recipe.yaml", 4, fakes.fake_stages())

    return make


@pytest.fixture
def approving() -> Policy:
    return Policy(max_memory_fraction=0.9, approve=True)


@pytest.fixture
def finished(tmp_path: Path, request_of, approving: Policy) -> Outcome:
    return drive(request_of(), tmp_path / "run", stages=fakes.fake_stages(), policy=approving)


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str


class Awaited(list[threading.Thread]):
    """A node's thread that the command line would leave behind, ending its process: the tests' goes on."""

    def append(self, thread: threading.Thread) -> None:
        thread.join(120)
        super().append(thread)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run the command line in this process, errors and exit code included."""
    from shardwright.workflows import limits
    from shardwright.workflows.cli.main import main

    monkeypatch.setattr(limits, "LEFT_BEHIND", Awaited())

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["shardwright", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        seen = capfd.readouterr()
        return Done(code, seen.out, seen.err)

    return run


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/tiny-moe, built once."""
    out = tmp_path_factory.mktemp("tiny")
    script = Path(__file__).parents[2] / "examples" / "tiny-moe" / "build.py"
    subprocess.run([sys.executable, str(script), "--out", str(out)], check=True, capture_output=True)
    return out


@pytest.fixture(scope="session")
def sinks(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with a tiny gpt_oss, whose softmax over scores and sinks no pattern knows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("sinks")
    shutil.copytree(built, folder, dirs_exist_ok=True)
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=264, num_local_experts=4, num_experts_per_tok=2,
        bos_token_id=0, eos_token_id=0, pad_token_id=1, layer_types=["full_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    for old in (folder / "checkpoint").glob("*.safetensors*"):
        old.unlink()
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "checkpoint")
    return folder


@pytest.fixture
def tiny(built: Path, tmp_path: Path) -> Path:
    """A copy of the example to damage at will: checkpoint/, recipe.yaml, train.jsonl, held_out.jsonl, policy.yaml."""
    folder = tmp_path / "tiny"
    shutil.copytree(built, folder)
    shutil.copy(Path(__file__).parents[2] / "examples" / "tiny-moe" / "policy.yaml", folder)
    return folder
