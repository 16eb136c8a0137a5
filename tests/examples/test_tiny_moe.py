"""examples/tiny-moe: the same bytes each time, a checkpoint that Transformers loads, a build whole or absent."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwright.schemas.policy import Policy
from shardwright.schemas.recipe import Recipe

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"


def run_builder(out: Path, builder: Path = SOURCE / "build.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(builder), "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "out"
    done = run_builder(out)
    assert done.returncode == 0, done.stderr
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_builds_are_byte_equal_and_the_second_call_builds_nothing(built: Path, tmp_path: Path) -> None:
    assert run_builder(tmp_path / "other").returncode == 0
    assert contents(tmp_path / "other") == contents(built)
    stamps = {path: path.stat().st_mtime_ns for path in built.rglob("*")}
    again = run_builder(built)
    assert again.returncode == 0 and "verified" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in built.rglob("*")} == stamps


def test_the_manifest_pins_every_file_but_the_record_and_the_recipe(built: Path) -> None:
    manifest = json.loads((SOURCE / "manifest.json").read_bytes())
    assert manifest["recorded"] == []
    assert {*manifest["exact"], "built.json", "recipe.yaml"} == set(contents(built))


def test_transformers_finds_every_tensor_and_no_other(built: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(built / "checkpoint", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stored: dict[str, torch.Tensor] = {}
    for shard in sorted((built / "checkpoint").glob("*.safetensors")):
        stored |= load_file(shard)
    moe = "model.layers.1.block_sparse_moe.experts"
    experts = model.model.layers[1].mlp.experts
    for expert in range(4):
        gate_up = torch.cat([stored[f"{moe}.{expert}.w1.weight"], stored[f"{moe}.{expert}.w3.weight"]])
        assert torch.equal(experts.gate_up_proj[expert], gate_up)
        assert torch.equal(experts.down_proj[expert], stored[f"{moe}.{expert}.w2.weight"])


def test_files_have_the_names_that_save_pretrained_writes(built: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(built / "checkpoint")
    model.save_pretrained(tmp_path, max_shard_size="250KB")
    saved = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    ours = json.loads((built / "checkpoint" / "model.safetensors.index.json").read_bytes())
    assert set(ours["weight_map"]) == set(saved["weight_map"])
    assert len(set(ours["weight_map"].values())) >= 2
    assert ours["metadata"] == saved["metadata"]


def test_the_tokenizer_gives_any_text_back_and_ends_with_end_of_text(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built / "checkpoint")
    text = "def f(x):\n\treturn 'Ünïcode ✓' # 0123\x00"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 264
    assert tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.eos_token_id] == [0]


def test_an_untrained_model_is_near_the_loss_of_chance(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(built / "checkpoint")
    text = json.loads((built / "held_out.jsonl").read_text().splitlines()[0])["text"]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert math.log(264) <= loss <= math.log(264) + 1  # logits of variance about one add about 0.5


def test_recipe_and_policy_are_valid_and_the_data_is_enough(built: Path) -> None:
    recipe = Recipe.model_validate(yaml.safe_load((built / "recipe.yaml").read_text()))
    assert Policy.model_validate(yaml.safe_load((SOURCE / "policy.yaml").read_text())).approve
    tokenizer = AutoTokenizer.from_pretrained(built / "checkpoint")
    needed = {
        recipe.data.train: recipe.schedule.steps * recipe.batch.tokens_per_step,
        recipe.data.held_out: recipe.schedule.held_out_sequences * recipe.batch.sequence_tokens,
    }
    texts = {name: [json.loads(line)["text"] for line in (built / name).read_text().splitlines()] for name in needed}
    for name, tokens in needed.items():
        assert sum(len(tokenizer(text)["input_ids"]) for text in texts[name]) >= tokens
    assert not set(texts[recipe.data.train]) & set(texts[recipe.data.held_out])


def test_a_damaged_build_is_built_again(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(built, out)
    shard = out / "checkpoint" / "model-00001-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    done = run_builder(out)
    assert done.returncode == 0 and "model-00001-of-00004" in done.stderr
    assert contents(out) == contents(built)


def test_a_partial_build_is_cleared_and_never_taken_for_a_whole_one(built: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial" / "checkpoint").mkdir(parents=True)
    (tmp_path / ".out.partial" / "stray").write_text("left by a killed build")
    assert run_builder(tmp_path / "out").returncode == 0
    assert contents(tmp_path / "out") == contents(built)
    assert not (tmp_path / ".out.partial").exists()


def test_a_folder_that_no_build_made_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    done = run_builder(tmp_path)
    assert done.returncode == 2 and "usage/not-a-build" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_builder_that_makes_other_bytes_fails_and_leaves_nothing(tmp_path: Path) -> None:
    shutil.copytree(SOURCE.parent / "common", tmp_path / "common")
    shutil.copytree(SOURCE, tmp_path / "tiny-moe")
    builder = tmp_path / "tiny-moe" / "build.py"
    builder.write_text(builder.read_text().replace("20260101", "7"))
    done = run_builder(tmp_path / "out", builder)
    assert done.returncode == 1 and "checkpoint/manifest-mismatch" in done.stderr
    assert "model-00001-of-00004.safetensors" in done.stderr
    assert not (tmp_path / "out").exists()
