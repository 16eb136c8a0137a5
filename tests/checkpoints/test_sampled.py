"""Which values are read of a checkpoint, and which changes of it are met."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.checkpoints import sampled
from shardwright.checkpoints.headers import TensorHeader, read_headers
from shardwright.checkpoints.marker import HEADERS_ONLY
from shardwright.checkpoints.sampled import pieces_of, weights_pin
from shardwright.schemas.errors import CheckpointError
from shardwright.schemas.profile import WeightsPin


def write(path: Path, tensors: list[tuple[str, tuple[int, ...]]], seed: int) -> None:
    """A file of random bytes behind its header."""
    header, place = {}, 0
    for name, shape in tensors:
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, place + 2 * prod(shape)]}
        place += 2 * prod(shape)
    data = json.dumps(header).encode()
    values = np.random.default_rng(seed).bytes(place)
    path.write_bytes(struct.pack("<Q", len(data)) + data + values)


def layers(numbers: range) -> list[tuple[str, tuple[int, ...]]]:
    """A rare kind, a middle one and a common one in each layer."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for layer in numbers:
        found.append((f"model.layers.{layer}.norm.weight", (64,)))
        found += [(f"model.layers.{layer}.attn.{name}.weight", (64, 64)) for name in ("q", "k", "v")]
        found += [(f"model.layers.{layer}.experts.{expert}.up.weight", (32, 64)) for expert in range(24)]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of two layers each, with an index."""
    index: dict[str, str] = {}
    for number in range(2):
        name, tensors = f"model-{number}.safetensors", layers(range(2 * number, 2 * number + 2))
        write(tmp_path / name, tensors, number)
        index.update(dict.fromkeys((tensor for tensor, _ in tensors), name))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return tmp_path


@pytest.fixture
def large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same where 24 pieces of 128 bytes are read of 263 KB."""
    monkeypatch.setattr(sampled, "MOST_BYTES", 24 * 128)
    monkeypatch.setattr(sampled, "PIECES", 24)
    monkeypatch.setattr(sampled, "PIECE_BYTES", 128)
    return folder


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_small_checkpoint_is_hashed_whole(folder: Path) -> None:
    """The hash of a file, from its own header: names, places and all bytes of the tensors in their order."""
    before = weights_pin(folder)
    for name in ("model-0.safetensors", "model-1.safetensors"):
        data = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        digest = hashlib.sha256()
        for tensor, entry in json.loads(data[8 : 8 + length]).items():
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            digest.update(f"{tensor}\0{start}\0{end - start}\n".encode() + data[start:end])
        assert before.files[name] == digest.hexdigest()
    assert before.read_bytes == 4 * 2 * (64 + 3 * 64 * 64 + 24 * 32 * 64)
    for place in (-1, -20_000, -60_000):
        flip(folder / "model-1.safetensors", place)
        now = weights_pin(folder)
        assert now.files["model-0.safetensors"] == before.files["model-0.safetensors"]
        assert now.files["model-1.safetensors"] != before.files["model-1.safetensors"]
        flip(folder / "model-1.safetensors", place)
    assert weights_pin(folder) == before


def test_pieces_of_a_large_checkpoint(large: Path) -> None:
    """An equal share a file; in it every tensor of a rare kind, the common kind evenly; inside their tensors."""
    headers = read_headers(large)
    found = pieces_of(headers)
    assert {name: len(pieces) for name, pieces in found.items()} == {
        "model-0.safetensors": 12,
        "model-1.safetensors": 12,
    }
    for name, pieces in found.items():
        assert all(one.end <= two.start for one, two in pairwise(pieces))
        for piece in pieces:
            tensor = headers.tensors[piece.tensor]
            assert tensor.file == name and tensor.start <= piece.start < piece.end <= tensor.end
            assert piece.end - piece.start == 128
        names = [piece.tensor for piece in pieces]
        assert sum("norm" in one for one in names) == 2 and sum("attn" in one for one in names) == 6
        assert {one.split(".")[2] for one in names if "experts" in one} == {one.split(".")[2] for one in names}
    assert weights_pin(large).read_bytes == 24 * 128


@pytest.mark.parametrize("kind", ["norm", ".q.", "experts"])
def test_a_kind_of_tensor_that_was_replaced_is_met(large: Path, kind: str) -> None:
    headers, before = read_headers(large), weights_pin(large)
    for name in headers.files:
        data = bytearray((large / name).read_bytes())
        for tensor in headers.tensors.values():
            if tensor.file == name and kind in tensor.name:
                data[tensor.start : tensor.end] = bytes(byte ^ 1 for byte in data[tensor.start : tensor.end])
        (large / name).write_bytes(data)
    now = weights_pin(large)
    assert all(now.files[name] != before.files[name] for name in headers.files)


def test_one_byte_outside_of_all_pieces_is_not_met(large: Path) -> None:
    """The limit, as it is told: a value of a large checkpoint may change unseen."""
    before, pieces = weights_pin(large), pieces_of(read_headers(large))["model-1.safetensors"]
    gap = next(one.end for one, two in pairwise(pieces) if two.start > one.end)
    flip(large / "model-1.safetensors", gap)
    assert weights_pin(large) == before
    flip(large / "model-1.safetensors", pieces[3].start)
    assert weights_pin(large) != before


def test_some_files_alone_hash_as_among_all(large: Path) -> None:
    whole = weights_pin(large)
    (one,) = weights_pin(large, files=["model-1.safetensors"]).files.items()
    assert one == ("model-1.safetensors", whole.files["model-1.safetensors"])


@given(size=st.integers(1, 5000), count=st.integers(1, 40), start=st.integers(0, 99))
def test_pieces_never_leave_their_tensor(size: int, count: int, start: int) -> None:
    pieces = list(sampled._cut(TensorHeader("a", "U8", (size,), "f", start, start + size), count))
    assert 1 <= len(pieces) <= count
    places = [start, *(place for piece in pieces for place in (piece.start, piece.end)), start + size]
    assert places == sorted(places)
    assert all(piece.end - piece.start == min(size, sampled.PIECE_BYTES) for piece in pieces)


@given(kinds=st.lists(st.integers(1, 60), min_size=1, max_size=12), share=st.integers(1, 40))
def test_the_share_is_used_and_no_kind_is_left_out_where_it_is_enough(kinds: list[int], share: int) -> None:
    tensors = [
        TensorHeader(f"{chr(97 + kind)}.{number}", "U8", (1,), "f", 0, 1)
        for kind, count in enumerate(kinds)
        for number in range(count)
    ]
    chosen = sampled._spread(tensors, share)
    assert len({one.name for one in chosen}) == len(chosen) == min(share, len(tensors))
    if share >= len(kinds):
        assert {one.name[0] for one in chosen} == {one.name[0] for one in tensors}


def test_headers_alone_have_no_values(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where the folder says so, and where its files are holes; one file with values is enough to read them all."""
    hollow = Path(shutil.copytree(folder, tmp_path_factory.mktemp("hollow") / "copy"))
    for path in hollow.glob("*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        path.write_bytes(data[: 8 + length])
        with open(path, "r+b") as stream:
            stream.truncate(len(data))
    assert weights_pin(hollow) == WeightsPin()
    shutil.copy(folder / "model-1.safetensors", hollow)
    assert set(weights_pin(hollow).files) == {"model-0.safetensors", "model-1.safetensors"}
    (folder / HEADERS_ONLY).write_text("{}")
    assert weights_pin(folder) == WeightsPin()


def test_files_that_cannot_be_read_are_named(folder: Path) -> None:
    headers = read_headers(folder)
    path = folder / "model-1.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"truncated-shard.*(.|\n)*model-1\.safetensors: model\.layers\.3"):
        weights_pin(folder, headers)
    path.unlink()
    with pytest.raises(CheckpointError, match="missing-shard"):
        weights_pin(folder, headers)


def test_a_real_checkpoint_pins_the_same_elsewhere(mixtral: tuple[Path, Any], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(mixtral[0], tmp_path / "copy"))
    assert weights_pin(copy) == weights_pin(mixtral[0]) != WeightsPin()
