"""Runs of bytes: many buffers of one call, more than one call may take, files that are gone or shrink."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright.checkpoints import shard_files
from shardwright.checkpoints.shard_files import Run, ShardFiles
from shardwright.schemas.errors import CheckpointError


def run_of(start: int, *sizes: int) -> tuple[Run, list[torch.Tensor]]:
    """A run from a byte on, with a buffer of each size."""
    run, buffers = Run("a.bin", start), [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    for at, buffer in enumerate(buffers):
        run.add(buffer, f"tensor {at}")
    return run, buffers


@pytest.mark.parametrize("most", [1 << 30, 5, 1])
def test_buffers_take_what_follows_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Also where one call of the system takes fewer bytes than a buffer has."""
    monkeypatch.setattr(shard_files, "MOST_BYTES", most)
    content = bytes(range(64))
    (tmp_path / "a.bin").write_bytes(content)
    run, buffers = run_of(3, 4, 1, 17, 2)
    assert (run.start, run.end) == (3, 27)
    files = ShardFiles(tmp_path)
    files.fill(run)
    assert b"".join(bytes(buffer.tolist()) for buffer in buffers) == content[3:27]
    assert files.bytes_read == 24
    files.close()
    files.fill(run)
    assert files.bytes_read == 48


def test_a_run_without_buffers_opens_nothing(tmp_path: Path) -> None:
    files = ShardFiles(tmp_path)
    files.fill(Run("", 0))
    assert files.bytes_read == 0


def test_the_tensor_whose_bytes_are_not_there_is_named(tmp_path: Path) -> None:
    files = ShardFiles(tmp_path)
    run, _ = run_of(0, 4, 4)
    with pytest.raises(CheckpointError, match="missing-shard"):
        files.fill(run)
    (tmp_path / "a.bin").write_bytes(bytes(6))
    with pytest.raises(CheckpointError, match="truncated-shard") as caught:
        files.fill(run)
    assert caught.value.where.endswith("a.bin: tensor 1") and "byte 6" in caught.value.what
