"""Positioned reads: any box of any tensor, counted to the byte, and a typed error when the file changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardwright.checkpoints import reader as module
from shardwright.checkpoints.headers import read_headers
from shardwright.checkpoints.reader import ShardReader
from shardwright.schemas.errors import CheckpointError

VALUES = {
    "cube": torch.arange(6 * 7 * 9, dtype=torch.float32).reshape(6, 7, 9),
    "half": torch.randn(5, 4).to(torch.bfloat16),
    "fp8": torch.randn(4, 6).to(torch.float8_e4m3fn),
    "mask": torch.tensor([[True, False], [False, True]]),
    "ids": torch.arange(5),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ShardReader:
    folder = tmp_path_factory.mktemp("reader")
    save_file(VALUES, folder / "model.safetensors")
    return ShardReader(folder, read_headers(folder))


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("name", VALUES)
def test_whole_tensors(reader: ShardReader, name: str) -> None:
    before = reader.bytes_read
    assert same(reader.read(name), VALUES[name])
    assert reader.bytes_read - before == VALUES[name].numel() * VALUES[name].element_size()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), rows=st.sampled_from([0, 40, 300, 1 << 18]), band=st.sampled_from([1, 100, 1 << 20]))
def test_any_box_by_any_way_of_reading(reader: ShardReader, data: st.DataObject, rows: int, band: int) -> None:
    """The thresholds only choose between reading rows whole and entering them."""
    box = []
    for size in VALUES["cube"].shape[: data.draw(st.integers(0, 3))]:
        low = data.draw(st.integers(0, size))
        box.append((low, data.draw(st.integers(low, size))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ROW_BYTES", rows)
        patch.setattr(module, "BAND_BYTES", band)
        found = reader.read("cube", tuple(box))
    assert torch.equal(found, VALUES["cube"][tuple(slice(*pair) for pair in box)])
    assert found.is_contiguous()


def test_rows_are_read_alone(reader: ShardReader) -> None:
    before = reader.bytes_read
    reader.read("cube", ((2, 4),))
    assert reader.bytes_read - before == 2 * 7 * 9 * 4


@pytest.mark.parametrize("box", [((0, 9),), ((3, 2),), ((-1, 2),), ((0, 1),) * 4])
def test_boxes_outside_are_refused(reader: ShardReader, box: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        reader.read("cube", box)
    assert caught.value.code == "checkpoint/bad-box"


def test_unknown_name(reader: ShardReader) -> None:
    with pytest.raises(CheckpointError) as caught:
        reader.read("ghost")
    assert caught.value.code == "checkpoint/unknown-tensor"


def test_a_file_that_shrinks_or_goes_is_an_error_not_a_crash(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4096)}, tmp_path / "model.safetensors")
    headers = read_headers(tmp_path)
    with ShardReader(tmp_path, headers) as reader:
        os.truncate(tmp_path / "model.safetensors", 2000)
        with pytest.raises(CheckpointError) as caught:
            reader.read("a")
        assert caught.value.code == "checkpoint/truncated-shard"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        reader.read("a")
    assert caught.value.code == "checkpoint/missing-shard"


def test_a_slice_of_a_huge_sparse_tensor_costs_its_own_bytes(published: Any, tmp_path: Path) -> None:
    """One expert of a 400 GB stack."""
    published.write_file(tmp_path / "model.safetensors", [("stack", "BF16", (4096, 7168, 7168))])
    reader = ShardReader(tmp_path, read_headers(tmp_path))
    part = reader.read("stack", ((4095, 4096), (0, 8)))
    assert part.shape == (1, 8, 7168) and not part.any()
    assert reader.bytes_read == 8 * 7168 * 2
