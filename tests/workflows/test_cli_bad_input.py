"""Bad input at the command line, on examples/tiny-moe: typed error, right exit code, nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from shardwright.search_spaces.catalogue import load_cluster


def plan(cli, folder: Path, cluster: object = "cpu-2"):
    return cli(
        "plan", folder / "checkpoint", "--cluster", cluster, "--recipe", folder / "recipe.yaml", "-o", folder / "p.json"
    )


def shard(folder: Path) -> Path:
    return sorted((folder / "checkpoint").glob("*.safetensors"))[1]


def lose_shard(folder: Path) -> None:
    shard(folder).unlink()


def cut_shard(folder: Path) -> None:
    shard(folder).write_bytes(shard(folder).read_bytes()[:-100])


def break_header(folder: Path) -> None:
    shard(folder).write_bytes(b"\xff" * 64)


def name_absent_tensor(folder: Path) -> None:
    path = folder / "checkpoint" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.ghost.weight"] = shard(folder).name
    path.write_text(json.dumps(index))


def lose_config(folder: Path) -> None:
    (folder / "checkpoint" / "config.json").unlink()


def unknown_architecture(folder: Path) -> None:
    path = folder / "checkpoint" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model_type": "nosuch", "architectures": ["NoSuchForCausalLM"]}))


def empty_data(folder: Path) -> None:
    (folder / "train.jsonl").write_text("\n\n")


def lose_data(folder: Path) -> None:
    (folder / "held_out.jsonl").unlink()


def not_text(folder: Path) -> None:
    (folder / "recipe.yaml").write_bytes(b"name: tiny\xff\n")


def recipe_with(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        raw = yaml.safe_load((folder / "recipe.yaml").read_text())
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**raw, **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "exit_code", "code"),
    [
        (lose_shard, 1, "checkpoint/missing-shard"),
        (cut_shard, 1, "checkpoint/truncated-shard"),
        (break_header, 1, "checkpoint/corrupt-header"),
        (name_absent_tensor, 1, "checkpoint/index-mismatch"),
        (lose_config, 1, "checkpoint/missing-config"),
        (unknown_architecture, 1, "checkpoint/unknown-architecture"),
        (empty_data, 2, "recipe/empty-data"),
        (lose_data, 2, "recipe/missing-data"),
        (not_text, 2, "recipe/unreadable"),
        (recipe_with(epochs=3), 2, "recipe/invalid"),
        (recipe_with(lora={"targets": ["no_such_module"]}), 6, "legality/target-matches-nothing"),
    ],
)
def test_damaged_input(cli, tiny, damage, exit_code, code) -> None:
    damage(tiny)
    done = plan(cli, tiny)
    assert f"error: [{code}]" in done.err, done.err
    assert done.code == exit_code
    assert "\n  where: " in done.err and "\n  next:  " in done.err
    assert done.out == "" and not (tiny / "p.json").exists()


def test_absent_data_is_said_before_the_checkpoint_is_parsed(cli, tiny) -> None:
    lose_data(tiny)
    break_header(tiny)
    assert "error: [recipe/missing-data]" in plan(cli, tiny).err


def test_files_of_bytes_that_are_no_text(cli, tiny) -> None:
    """A policy and a language model's options, as a wrong path or another program's file gives them."""
    binary = tiny / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for words in (("policy", "test", binary, tiny / "p.json"), ("plan", tiny, "--llm-config", binary)):
        options = () if words[0] == "policy" else ("-c", "cpu-2", "-r", tiny / "recipe.yaml")
        done = cli(*words, *options)
        assert done.code == 2 and "error: [usage/unreadable] not UTF-8 text: byte 0xff at offset 0" in done.err


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"devices_per_node": -2}, "cluster/invalid", "devices_per_node"),
        ({"nodez": 1}, "cluster/invalid", "nodez: unknown key"),
        ({"links": []}, "cluster/invalid", "intra_node is missing"),
    ],
)
def test_wrong_cluster_file(cli, tiny, change, code, named) -> None:
    raw = load_cluster("cpu-2").model_dump(mode="json")
    path = tiny / "cluster.yaml"
    path.write_text(yaml.safe_dump({**raw, **change}))
    done = plan(cli, tiny, path)
    assert done.code == 2 and code in done.err and named in done.err


def test_unknown_names(cli, tiny) -> None:
    for arguments, exit_code, code in (
        (("plan", tiny / "nowhere", "-c", "cpu-2", "-r", tiny / "recipe.yaml"), 1, "checkpoint/missing-folder"),
        (("plan", tiny / "checkpoint", "-c", "no-such", "-r", tiny / "recipe.yaml"), 2, "cluster/unknown-cluster"),
        (("plan", tiny / "checkpoint", "-c", "cpu-2", "-r", tiny / "no.yaml"), 2, "recipe/missing"),
        (("show", tiny / "no.json"), 5, "plan/missing"),
        (("show", "--schema", "Nothing"), 2, "usage/unknown-schema"),
        (("status", tiny), 1, "run/no-run"),
        (("resume", tiny), 1, "run/no-run"),
        (("apply", tiny / "no.json", "--checkpoint", tiny / "checkpoint"), 5, "plan/missing"),
    ):
        done = cli(*arguments)
        assert (done.code, code in done.err) == (exit_code, True), done.err


def test_headless_needs_a_policy_and_a_right_one(cli, tiny) -> None:
    base = ("adapt", tiny / "checkpoint", "-c", "cpu-2", "-r", tiny / "recipe.yaml", "--run-dir", tiny / "run")
    assert cli(*base, "--headless").code == 2
    assert cli(*base, "--policy", tiny / "policy.yaml").code == 2
    (tiny / "policy.yaml").write_text("aprove: true\n")
    done = cli(*base, "--headless", "--policy", tiny / "policy.yaml")
    assert done.code == 2 and "aprove: unknown key" in done.err
    assert not (tiny / "run").exists()


def test_errors_reach_machines_too(cli, tiny) -> None:
    lose_shard(tiny)
    (tiny / "policy.yaml").write_text("approve: true\n")
    command = ("adapt", tiny / "checkpoint", "-c", "cpu-2", "-r", tiny / "recipe.yaml", "--run-dir", tiny / "run")
    done = cli(*command, "--headless", "--policy", tiny / "policy.yaml", "--output", "json")
    assert done.code == 1
    error = json.loads(done.out)["error"]
    assert error["code"] == "checkpoint/missing-shard" and error["exit_code"] == 1 and error["next"]
    done = cli(*command, "--headless", "--policy", tiny / "policy.yaml", "--output", "junit")
    assert '<failure message="[checkpoint/missing-shard]' in done.out
    status = cli("status", tiny / "run", "--output", "json")
    found = json.loads(status.out)
    assert found["state"] == "failed" and found["nodes"][0]["state"] == "failed: checkpoint/missing-shard"
