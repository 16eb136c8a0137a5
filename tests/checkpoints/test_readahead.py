"""Reading ahead: each want once, in the order of the files, in few calls, in bounded memory, by threads that end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from shardwright.checkpoints import readahead
from shardwright.checkpoints.headers import read_headers
from shardwright.checkpoints.readahead import ReadAhead, Want, batches_of, readers_for
from shardwright.checkpoints.reader import ShardReader
from shardwright.schemas.errors import CheckpointError

SHAPES = {"a": (8, 16), "b": (4, 4, 4), "c": (3,), "d": (32, 8), "e": (5, 7), "f": (64,)}
DTYPES = {
    "a": torch.float32,
    "b": torch.bfloat16,
    "c": torch.uint8,
    "d": torch.float16,
    "e": torch.int8,
    "f": torch.float32,
}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ShardReader, dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("ahead")
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.randint(0, 100, shape, generator=generator).to(DTYPES[name]) for name, shape in SHAPES.items()}
    save_file({name: made[name] for name in "abc"}, folder / "model-00001-of-00002.safetensors")
    save_file({name: made[name] for name in "def"}, folder / "model-00002-of-00002.safetensors")
    index = {name: f"model-0000{1 if name in 'abc' else 2}-of-00002.safetensors" for name in SHAPES}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    with ShardReader(folder, read_headers(folder)) as reader:
        yield reader, made


def _take(ahead: ReadAhead) -> dict[int, list[torch.Tensor]]:
    found = {}
    with ahead:
        for filled in ahead:
            for number, tensors in filled.batch.by_want(filled.data):
                assert number not in found
                found[number] = [tensor.clone() for tensor in tensors]
            filled.data.fill_(0)
            ahead.give_back(filled, lambda: None)
    return found


@settings(max_examples=120, deadline=None)
@given(data=st.data(), readers=st.integers(1, 4), room=st.sampled_from([64, 200, 1000, 1 << 20]))
def test_any_wants_come_once_and_right(values: Any, data: st.DataObject, readers: int, room: int) -> None:
    reader, made = values
    wants: list[Want] = []
    for _ in range(data.draw(st.integers(0, 8))):
        parts = []
        for _ in range(data.draw(st.integers(1, 3))):
            name = data.draw(st.sampled_from(sorted(SHAPES)))
            box = []
            for size in SHAPES[name]:
                low = data.draw(st.integers(0, size - 1))
                box.append((low, data.draw(st.integers(low + 1, size))))
            parts.append(reader.part(name, tuple(box)))
        wants.append(tuple(parts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readahead, "BUFFER_BYTES", room)
        ahead = ReadAhead(reader, wants, readers=readers)
        batches = batches_of(reader, wants)
        found = _take(ahead)
        too_large = max((batch.size for batch in batches if batch.size > room), default=0)
        assert ahead.staging_bytes <= (readers + readahead.SPARE) * room + too_large
        assert all(batch.size <= room or len(batch.wants) == 1 for batch in batches)
    assert sorted(found) == list(range(len(wants)))
    for number, want in enumerate(wants):
        for part, tensor in zip(want, found[number], strict=True):
            assert torch.equal(tensor, made[part.tensor][tuple(slice(*extent) for extent in part.box)])


def test_neighbours_in_a_file_are_one_call(values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wants in any order: the tensors of a file lie one behind the other and are read by one call of the system."""
    reader, made = values
    calls, real = [], os.preadv

    def counted(handle: int, buffers: Any, at: int) -> int:
        calls.append(sum(len(one) for one in buffers))
        return real(handle, buffers, at)

    monkeypatch.setattr(os, "preadv", counted)
    _take(ReadAhead(reader, [(reader.part(name),) for name in "fcadbe"], readers=2))
    assert sorted(calls) == sorted(sum(made[name].nbytes for name in names) for names in ("abc", "def"))


def test_readers_run_ahead_and_no_further_than_their_buffers(values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is given back, as many batches are read as there are buffers, and not one more."""
    reader, _ = values
    monkeypatch.setattr(readahead, "BUFFER_BYTES", 64)
    wants: list[Want] = [(reader.part("a", ((row, row + 1),)),) for row in range(8)]
    ahead = ReadAhead(reader, wants, readers=2)
    with ahead:
        first = next(iter(ahead))
        ahead._pool.shutdown(wait=True)
        assert len(ahead._waiting) == 2 + readahead.SPARE - 1 and all(future.done() for _, future in ahead._waiting)
        assert first.data.data_ptr() not in {filled.data.data_ptr() for filled, _ in ahead._waiting}


def test_what_a_thread_meets_is_raised_here_and_the_threads_end(tmp_path: Path) -> None:
    save_file({f"t{number}": torch.zeros(4096) for number in range(8)}, tmp_path / "model.safetensors")
    reader = ShardReader(tmp_path, read_headers(tmp_path))
    os.truncate(tmp_path / "model.safetensors", 9000)
    with pytest.raises(CheckpointError) as caught:
        _take(ReadAhead(reader, [(reader.part(f"t{number}"),) for number in range(8)], readers=3))
    assert caught.value.code == "checkpoint/truncated-shard" and "model.safetensors: t" in str(caught.value)
    assert not [one for one in threading.enumerate() if one.name.startswith("shard-reader")]


def test_a_disk_that_does_not_answer_is_a_typed_error(values: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _ = values

    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match=r"unreadable-shard.*Input/output error") as caught:
        reader.read("a")
    assert "model-00001-of-00002.safetensors: a" in str(caught.value)


def test_one_who_stops_taking_leaves_no_thread(values: Any) -> None:
    reader, _ = values
    ahead = ReadAhead(reader, [(reader.part(name),) for name in SHAPES], readers=2)
    with pytest.raises(KeyboardInterrupt), ahead:
        for _ in ahead:
            raise KeyboardInterrupt
    assert not [one for one in threading.enumerate() if one.name.startswith("shard-reader")]


@pytest.mark.parametrize(
    ("cores", "processes", "readers"),
    [(None, 1, 1), (1, 1, 1), (2, 1, 2), (16, 1, 8), (128, 8, 8), (32, 8, 4), (4, 8, 1)],
)
def test_threads_are_a_process_share_of_the_cores(cores: int | None, processes: int, readers: int) -> None:
    assert readers_for(cores, processes) == readers
