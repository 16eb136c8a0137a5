"""Headers: what a sound file gives, and that every kind of damage is one typed error."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from shardwright.checkpoints.headers import MAX_HEADER_BYTES, read_file_header, read_headers
from shardwright.schemas.errors import CheckpointError

INDEX = "model.safetensors.index.json"


@pytest.fixture()
def folder(mixtral: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixtral[0], tmp_path / "checkpoint"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def one_file(folder: Path, table: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    size = len(text) if length is None else length
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)
    return folder


def entry(start: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


def code_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_headers(folder)
    assert caught.value.where and caught.value.next_action
    return caught.value.code.removeprefix("checkpoint/")


def test_agrees_with_the_safetensors_library(folder: Path) -> None:
    headers = read_headers(folder)
    names = set()
    for path in shards(folder):
        with safe_open(path, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - safe_open is not a mapping
                names.add(name)
                part = handle.get_slice(name)
                found = headers.tensors[name]
                assert (found.file, list(found.shape), found.dtype) == (path.name, part.get_shape(), part.get_dtype())
    assert names == set(headers.tensors)
    assert headers.files == {path.name: path.stat().st_size for path in shards(folder)}
    assert headers.stored_bytes == sum(tensor.numel * 4 for tensor in headers.tensors.values())


def test_every_shard_cut_anywhere_is_refused(folder: Path) -> None:
    path = shards(folder)[1]
    whole = path.read_bytes()
    for keep in (0, 3, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        assert code_of(folder) == "truncated-shard", keep
    path.write_bytes(whole + b"x")
    assert code_of(folder) == "corrupt-header"


def test_missing_shard(folder: Path) -> None:
    shards(folder)[2].unlink()
    assert code_of(folder) == "missing-shard"


def edit_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_index_that_names_an_absent_tensor(folder: Path) -> None:
    edit_index(folder, lambda table: table.update(ghost=next(iter(table.values()))))
    assert code_of(folder) == "index-mismatch"


def test_index_that_forgets_a_tensor(folder: Path) -> None:
    edit_index(folder, lambda table: table.pop(next(iter(table))))
    assert code_of(folder) == "index-mismatch"


def test_index_that_points_at_the_wrong_shard(folder: Path) -> None:
    def move(table: dict[str, str]) -> None:
        name = next(iter(table))
        table[name] = next(file for file in table.values() if file != table[name])

    edit_index(folder, move)
    assert code_of(folder) == "index-mismatch"


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..\\x.safetensors",
        ".hidden.safetensors",
        "model.bin",
        "x\x00.safetensors",
        "",
        "model.safetensors\n",
    ],
)
def test_path_tricks_in_the_index(folder: Path, name: str) -> None:
    (folder.parent / "secret.safetensors").write_bytes(shards(folder)[0].read_bytes())
    edit_index(folder, lambda table: table.update(dict.fromkeys(table, name)))
    assert code_of(folder) == "unsafe-path"


def test_link_out_of_the_folder_is_refused_and_hub_cache_links_are_not(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    path = shards(folder)[0]
    shutil.move(path, outside)
    path.symlink_to(outside)
    assert code_of(folder) == "unsafe-path"
    hub = tmp_path / "hub"
    snapshot = hub / "snapshots" / "abc"
    shutil.copytree(folder, snapshot, symlinks=True)
    (hub / "blobs").mkdir()
    shutil.move(outside, hub / "blobs" / "0123")
    link = snapshot / path.name
    link.unlink()
    link.symlink_to(Path("../../blobs/0123"))
    assert len(read_headers(snapshot).tensors) > 0


def test_one_tensor_in_two_shards(folder: Path, published: Any) -> None:
    first, second = shards(folder)[:2]
    _, tensors = read_file_header(folder, first.name)
    published.write_file(second, [(tensors[0].name, "F32", tensors[0].shape)])
    assert code_of(folder) == "duplicate-tensor"


def test_weights_only_as_pickle(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    assert code_of(tmp_path) == "unsafe-weights"


def test_no_weights_and_no_folder(tmp_path: Path) -> None:
    assert code_of(tmp_path) == "missing-weights"
    assert code_of(tmp_path / "absent") == "missing-folder"
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert code_of(tmp_path) == "missing-weights"


def test_corrupt_index(folder: Path) -> None:
    for text in (
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a":"x","a":"y"}}',
    ):
        (folder / INDEX).write_text(text)
        assert code_of(folder) == "corrupt-index", text


CORRUPT: dict[str, Any] = {
    "not json": b"{{{{",
    "not utf-8": b'{"\xff\xfe": 1}',
    "a list": [],
    "a number": 12,
    "nan": b'{"a": NaN}',
    "twice": b'{"a":%b,"a":%b}' % ((b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',) * 2),
    "metadata not text": {"__metadata__": {"format": 1}},
    "entry not an object": {"a": 3},
    "key missing": {"a": {"dtype": "F32", "shape": [1]}},
    "key too many": {"a": {**entry(0, 4), "more": 1}},
    "unknown dtype": {"a": entry(0, 4, dtype="F31")},
    "dtype not text": {"a": entry(0, 4) | {"dtype": 5}},
    "negative size": {"a": entry(0, 4, shape=[-1])},
    "boolean size": {"a": entry(0, 4, shape=[True])},  # type: ignore[list-item]
    "float size": {"a": entry(0, 4, shape=[1.0])},  # type: ignore[list-item]
    "overflowing size": {"a": entry(0, 4, shape=[1 << 40, 1 << 40])},
    "too many dims": {"a": entry(0, 4, shape=[1] * 40)},
    "offsets reversed": {"a": entry(4, 0, shape=[1])},
    "offsets negative": {"a": entry(-4, 0, shape=[1])},
    "offsets not a pair": {"a": entry(0, 4) | {"data_offsets": [0, 4, 8]}},
    "bytes do not fit shape": {"a": entry(0, 4, shape=[2])},
    "overlap": {"a": entry(0, 4), "b": entry(2, 6, dtype="U8", shape=[4])},
    "same place": {"a": entry(0, 4), "b": entry(0, 4)},
    "gap": {"a": entry(0, 4), "b": entry(6, 8, dtype="U8", shape=[2])},
    "empty name": {"": entry(0, 4)},
    "unprintable name": {"\ud800": entry(0, 4)},
    "long name": {"a" * 2000: entry(0, 4)},
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_header(tmp_path: Path, case: str) -> None:
    assert code_of(one_file(tmp_path, CORRUPT[case], b"\0" * 8)) == "corrupt-header"


def test_bottomless_nesting(tmp_path: Path) -> None:
    assert code_of(one_file(tmp_path, b'{"a":' * 200_000)) == "corrupt-header"
    assert code_of(one_file(tmp_path, b"[" * 200_000)) == "corrupt-header"


def test_header_longer_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    path = one_file(tmp_path, b"{}", length=100_000_001) / "model.safetensors"
    os.truncate(path, 100_000_100)
    assert code_of(tmp_path) == "corrupt-header"


def test_huge_header_length_in_a_small_file(tmp_path: Path) -> None:
    assert code_of(one_file(tmp_path, b"{}", length=(1 << 63) + 5)) == "corrupt-header"
    assert code_of(one_file(tmp_path, b"{}", length=1000)) == "truncated-shard"


@pytest.mark.parametrize("junk", [b"\0", b"[", b'{"', b'"a":'])
def test_a_header_of_a_hundred_megabytes_of_junk(tmp_path: Path, junk: bytes) -> None:
    """The longest header that is read at all, whole on disk."""
    header = junk * (MAX_HEADER_BYTES // len(junk))
    assert code_of(one_file(tmp_path, header)) == "corrupt-header"


def parse(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    try:
        read_headers(folder)
    except CheckpointError:
        return


@settings(max_examples=400, deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes_give_only_typed_errors(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    parse(tmp_path_factory.getbasetemp(), data)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["F32", "U8"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": SCALARS,
        "shape": st.lists(st.integers(-1, 1 << 70) | SCALARS, max_size=4) | VALUES,
        "data_offsets": st.lists(st.integers(-1, 100), max_size=3) | VALUES,
    },
)


@settings(max_examples=400, deadline=None)
@given(table=st.dictionaries(st.text(max_size=5), ENTRIES | VALUES, max_size=4), data=st.binary(max_size=32))
def test_random_headers_give_only_typed_errors(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any], data: bytes
) -> None:
    text = json.dumps(table).encode()
    parse(tmp_path_factory.getbasetemp(), len(text).to_bytes(8, "little") + text + data)


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_one_changed_byte_is_harmless_or_typed(
    tmp_path_factory: pytest.TempPathFactory, mixtral: tuple[Path, Any], place: int, value: int
) -> None:
    data = bytearray(shards(mixtral[0])[0].read_bytes()[:6000])
    data[place % len(data)] = value
    parse(tmp_path_factory.getbasetemp(), bytes(data))


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from(["F32", "U8", "BF16"]), st.lists(st.integers(0, 5), max_size=3)), max_size=5
    )
)
def test_every_sound_header_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, published: Any, sizes: list[tuple[str, list[int]]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    tensors = [(f"t{place}", dtype, tuple(shape)) for place, (dtype, shape) in enumerate(sizes)]
    published.write_file(folder / "model.safetensors", tensors)
    found = read_headers(folder)
    assert [(t.name, t.dtype, t.shape) for t in found.tensors.values()] == sorted(
        tensors, key=lambda t: (found.tensors[t[0]].start, found.tensors[t[0]].end)
    )
    assert {t.name for t in found.tensors.values()} == {t[0] for t in tensors}
