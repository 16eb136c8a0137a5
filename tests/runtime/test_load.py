"""Weights into a model: every bit where it belongs, host memory bounded, threads that end, what is said on the way."""

from __future__ import annotations

import threading
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardwright.checkpoints import readahead
from shardwright.checkpoints.conversion import Piece
from shardwright.checkpoints.headers import read_headers
from shardwright.checkpoints.reader import ShardReader
from shardwright.runtime.device import open_device
from shardwright.runtime.files import open_files
from shardwright.runtime.load import decode, fills
from shardwright.runtime.load.decode import read_base
from shardwright.runtime.load.fills import all_finite, cut_source
from shardwright.runtime.load.stream import load_weights, materialize
from shardwright.schemas.errors import CheckFailed, CheckpointError

SMALL = 1 << 14
"""Bytes of a buffer that few parameters of the examples fit into whole."""


def _load(folder: Path, readers: int = 2, progress: Any = None) -> tuple[Any, Any, Any]:
    model, files = open_files(folder, torch.bfloat16)
    device = open_device("cpu", 0)
    materialize(model, device)
    facts = load_weights(
        model, folder, files.headers, files.names, device, lora_seed=0, progress=progress, readers=readers
    )
    return model, files, facts


def _threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("shard-reader")]


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int4", "blocks", "plain"])
def test_small_buffers_and_many_threads_change_no_bit(
    kind: str, readers: int, packed: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter is what reading it whole gives; host memory is a few buffers, not a parameter."""
    monkeypatch.setattr(readahead, "BUFFER_BYTES", SMALL)
    monkeypatch.setattr(fills, "FILL_BYTES", SMALL // 2)
    monkeypatch.setattr(decode, "DECODED_AT_ONCE", SMALL // 4)
    told: list[tuple[int, int, int, float]] = []
    folder = (tiny if kind == "plain" else packed(kind)).checkpoint
    model, files, facts = _load(folder, readers, lambda *one: told.append(one))
    with ShardReader(files.folder, files.headers) as reader:
        for name, value in model.named_parameters():
            whole = read_base(reader, files.names, name, tuple(value.shape))
            assert torch.equal(value.detach(), whole.to(value.dtype)), name
    assert facts.staging_bytes <= (readers + readahead.SPARE) * SMALL and facts.readers == readers
    assert max(value.numel() * value.element_size() for value in model.parameters()) > 2 * SMALL
    of = len(list(model.named_parameters()))
    assert told[-1][:3] == (facts.bytes_read, of, of) and facts.peak_host_bytes > 0
    assert [one[1] for one in told] == sorted(one[1] for one in told) and told[0][1] < of
    stored = sum(header.stored_bytes for header in files.headers.tensors.values())
    assert 0.9 * stored <= facts.bytes_read <= 1.1 * stored
    assert not _threads()


def test_a_part_larger_than_a_buffer_gets_memory_of_its_own(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "BUFFER_BYTES", 256)
    model, files, facts = _load(packed("fp8").checkpoint)
    with ShardReader(files.folder, files.headers) as reader:
        for name, value in model.named_parameters():
            assert torch.equal(value.detach(), read_base(reader, files.names, name, tuple(value.shape)).to(value.dtype))
    largest = max(header.stored_bytes for header in files.headers.tensors.values())
    assert largest <= facts.staging_bytes <= 2 * largest + 4 * 256


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_names_its_tensor_and_place(value: float, packed: Any, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    copytree(packed("mxfp4").checkpoint, folder)
    name = "model.layers.0.self_attn.k_proj.weight"
    stored = load_file(folder / "model.safetensors")
    stored[name][3, 5] = value
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckFailed, match=r"1 values of .*k_proj.weight are not finite.* at \[3, 5\]") as caught:
        _load(folder)
    assert caught.value.code == "check/nan-weights" and f"model.safetensors: {name}" in str(caught.value)
    assert not _threads()


def test_a_scale_that_is_none_names_its_stack(packed: Any, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    copytree(packed("mxfp4").checkpoint, folder)
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if name.endswith("2.w1.weight_scale"))
    stored[name].view(torch.uint8)[1, 0] = 255
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckFailed, match="nan-weights") as caught:
        _load(folder)
    assert name in str(caught.value)


@pytest.mark.parametrize("readers", [1, 4])
def test_a_file_that_shrinks_under_the_threads_is_one_typed_error(readers: int, packed: Any, tmp_path: Path) -> None:
    folder = tmp_path / "shrinks"
    copytree(packed("fp8").checkpoint, folder)
    model, files = open_files(folder, torch.bfloat16)
    device = open_device("cpu", 0)
    materialize(model, device)
    file = folder / "model.safetensors"
    last = max(files.headers.tensors.values(), key=lambda one: one.end)
    with open(file, "r+b") as stream:
        stream.truncate(last.start + 1)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, folder, files.headers, files.names, device, lora_seed=0, readers=readers)
    assert caught.value.code == "checkpoint/truncated-shard"
    assert str(file) in str(caught.value) and last.name in str(caught.value)
    assert not _threads()


def test_a_tensor_of_another_format_is_refused_before_anything_is_read(tiny: Any, tmp_path: Path) -> None:
    """Three experts in bf16 and one in fp32 would fill one stack."""
    folder = tmp_path / "mixed"
    copytree(tiny.checkpoint, folder)
    name = next(name for name in read_headers(folder).tensors if ".experts." in name and ".1." in name)
    file = folder / read_headers(folder).tensors[name].file
    stored = load_file(file)
    stored[name] = stored[name].to(torch.bfloat16 if stored[name].dtype == torch.float32 else torch.float32)
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="mixed-dtypes"):
        _load(folder)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_cuts_cover_a_piece_once_and_keep_to_blocks(data: st.DataObject) -> None:
    """Every value of the piece once, at the place that its axes give, in cuts of no more values than allowed."""
    rank = data.draw(st.integers(1, 3))
    shape = [data.draw(st.integers(1, 9)) for _ in range(rank)]
    steps = tuple(data.draw(st.sampled_from([1, 2, 4])) for _ in range(rank))
    axes = tuple(data.draw(st.permutations(range(rank))))
    source = []
    for size in shape:
        low = data.draw(st.integers(0, size - 1))
        source.append((low, data.draw(st.integers(low + 1, size))))
    target = tuple((10, 10 + source[axis][1] - source[axis][0]) for axis in axes)
    most = data.draw(st.integers(1, 40))
    whole = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    box = tuple(slice(*one) for one in source)
    found = torch.zeros([stop - start for start, stop in target], dtype=torch.int64)
    for one in cut_source(Piece("t", tuple(source), target, axes), most, steps):
        values = whole[tuple(slice(*extent) for extent in one.source)]
        assert values.numel() <= max(most, torch.Size(steps).numel())
        place = tuple(slice(low - 10, high - 10) for low, high in one.target)
        assert not found[place].any()
        found[place] = values.permute(axes)
        inside = [low for (low, _), (first, _), step in zip(one.source, source, steps, strict=True) if low > first]
        assert all(any(low % step == 0 for step in steps) for low in inside)
    assert torch.equal(found, whole[box].permute(axes))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_value_anywhere_is_seen(dtype: torch.dtype, bad: float) -> None:
    for size, at in ((1, 0), (7, 6), (4096, 0), (4097, 4096), (100_003, 77_777)):
        value = torch.linspace(-3, 3, size).to(dtype)
        assert bool(all_finite(value))
        value[at] = bad
        assert not bool(all_finite(value)) and not bool(all_finite(value.expand(2, -1)))
    assert bool(all_finite(torch.empty(0, dtype=dtype)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int4", "blocks", "plain"])
def test_a_device_gets_the_bits_that_a_host_gets(
    kind: str, packed: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies run beside reads, and a buffer is filled again only when its copy has ended: many small ones."""
    monkeypatch.setattr(readahead, "BUFFER_BYTES", SMALL)
    monkeypatch.setattr(fills, "FILL_BYTES", SMALL // 2)
    monkeypatch.setattr(decode, "DECODED_AT_ONCE", SMALL // 4)
    folder = (tiny if kind == "plain" else packed(kind)).checkpoint
    expected = dict(_load(folder)[0].named_parameters())
    device = open_device("cuda", 0)
    for readers in (1, 4, 8):
        model, files = open_files(folder, torch.bfloat16)
        materialize(model, device)
        load_weights(model, folder, files.headers, files.names, device, lora_seed=0, readers=readers)
        for name, value in model.named_parameters():
            assert value.is_cuda and torch.equal(value.detach().cpu(), expected[name].detach()), name
