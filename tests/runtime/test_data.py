"""The same sequences on every mesh, and data that cannot train is refused."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.checkpoints.config import read_config
from shardwright.runtime.batches import Batches
from shardwright.runtime.data import cut, load_sequences
from shardwright.runtime.records import LOOKED_AT, look
from shardwright.runtime.texts import read_texts, tokenise
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.recipe import DataSpec, Recipe

SPEC = DataSpec(train="t", held_out="h")


@given(
    ranks=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2]),
    accumulation=st.integers(1, 3),
    rows=st.integers(1, 40),
    seed=st.integers(0, 9),
    step=st.integers(1, 9),
)
def test_union_of_a_step_depends_on_no_mesh(
    ranks: int, micro: int, accumulation: int, rows: int, seed: int, step: int
) -> None:
    sequences = np.arange(rows * 3).reshape(rows, 3)
    per_step = ranks * micro * accumulation
    split = Batches(sequences, per_step, ranks, micro, seed)
    parts = [split.micro_batches(step, rank) for rank in range(ranks)]
    assert all(len(part) == accumulation and all(len(ids) == micro for ids in part) for part in parts)
    together = torch.cat([ids for part in parts for ids in part])
    assert torch.equal(together, Batches(sequences, per_step, 1, 1, seed).global_batch(step))


@given(rows=st.integers(1, 12), per_step=st.integers(1, 7), seed=st.integers(0, 5))
def test_epochs_use_every_sequence_once(rows: int, per_step: int, seed: int) -> None:
    batches = Batches(np.arange(rows)[:, None], per_step, 1, 1, seed)
    stream = [index for step in range(1, 2 * rows + 2) for index in batches.indices(step)]
    for epoch in range(len(stream) // rows):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty-data"),
        ("\n\n", "empty-data"),
        ('{"text": ""}\n', "empty-data"),
        ("{broken\n", "bad-record"),
        ('{"txt": "a"}\n', "bad-record"),
        ('{"text": 3}\n', "bad-record"),
        ("[1]\n", "bad-record"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, code: str) -> None:
    """By the run and, before that, by the first look of a plan."""
    path = write(tmp_path / "data.jsonl", text)
    for reader in (read_texts, look):
        with pytest.raises(RecipeError) as caught:
            reader(path, SPEC)
        assert caught.value.code == f"recipe/{code}" and "data.jsonl" in caught.value.where


def test_a_wrong_field_is_refused_by_both_names(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", json.dumps({"content": "a", "id": 3}) + "\n")
    with pytest.raises(RecipeError, match="no text under 'text': the record has 'content', 'id'") as caught:
        look(path, SPEC)
    assert caught.value.where == f"{path}:1" and "text_field" in caught.value.next_action
    with pytest.raises(RecipeError, match="no messages under 'messages': the record has 'content', 'id'"):
        look(path, SPEC.model_copy(update={"format": "jsonl-messages"}))


def test_bytes_that_are_no_text_are_refused_by_their_place(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "\xff"}\n')
    for reader in (read_texts, look):
        with pytest.raises(RecipeError, match="byte 10 of the line is no UTF-8") as caught:
            reader(path, SPEC)
        assert caught.value.where == f"{path}:3"


def test_a_first_look_ends_early_but_not_before_a_text(tmp_path: Path) -> None:
    """What is broken behind the first records is the run's to find; a file whose first texts are empty is not empty."""
    text, empty = json.dumps({"text": "a"}), json.dumps({"text": ""})
    look(write(tmp_path / "late.jsonl", "\n".join([text] * LOOKED_AT + ["{broken"])), SPEC)
    look(write(tmp_path / "filled.jsonl", "\n".join([empty] * (LOOKED_AT + 5) + [text])), SPEC)
    with pytest.raises(RecipeError, match="bad-record"):
        look(write(tmp_path / "early.jsonl", "\n".join([text, "{broken"])), SPEC)


def test_packed_ids_are_read_as_they_lie(tiny: Any, tmp_path: Path) -> None:
    config, path = read_config(tiny.checkpoint), tmp_path / "ids.npy"
    spec = {"train": "a", "held_out": "b", "format": "packed"}
    recipe = Recipe.model_validate({"data": spec, "batch": {"sequence_tokens": 4}})
    np.save(path, np.arange(11, dtype=np.uint16))
    look(path, recipe.data)
    rows = load_sequences(path, recipe, tiny.checkpoint, config, tmp_path / "cache", 2)
    assert rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]] and not (tmp_path / "cache").exists()
    assert Batches(rows, 2, 1, 2, 0).global_batch(1).dtype == torch.int64
    with pytest.raises(RecipeError, match="packed-borders"):
        look(path, recipe.data.model_copy(update={"document_mask": True}))


@pytest.mark.parametrize(
    ("ids", "code"),
    [
        (np.zeros((2, 2), dtype=np.int64), "bad-record"),
        (np.zeros(4), "bad-record"),
        (np.zeros(0, dtype=np.int64), "empty-data"),
        (np.array([1, -2]), "wrong-tokenizer"),
        (np.array([1, 1 << 20]), "wrong-tokenizer"),
        (None, "bad-record"),
    ],
)
def test_packed_ids_that_cannot_be_are_refused(tiny: Any, tmp_path: Path, ids: Any, code: str) -> None:
    path = write(tmp_path / "ids.npy", "no array")
    if ids is not None:
        np.save(path, ids)
    spec = {"train": "a", "held_out": "b", "format": "packed"}
    recipe = Recipe.model_validate({"data": spec, "batch": {"sequence_tokens": 1}})
    with pytest.raises(RecipeError, match=code):
        load_sequences(path, recipe, tiny.checkpoint, read_config(tiny.checkpoint), tmp_path / "cache", 1)


@pytest.mark.parametrize("text", ["version https://git-lfs.github.com/spec/v1\n", "[]", "{}"])
def test_a_tokenizer_that_is_none_is_refused(tiny: Any, tmp_path: Path, text: str) -> None:
    write(tmp_path / "tokenizer.json", text)
    with pytest.raises(RecipeError, match="bad-tokenizer"):
        tokenise(["a"], tmp_path, read_config(tiny.checkpoint), "here")


def test_missing_file_and_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="missing-data"):
        read_texts(tmp_path / "none.jsonl", SPEC)
    path = write(tmp_path / "data.jsonl", "{}")
    with pytest.raises(RecipeError, match="data-format"):
        read_texts(path, SPEC.model_copy(update={"format": "packed"}))


def test_parquet_needs_pyarrow_and_a_column_of_texts(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"format": "parquet-text"})
    path = tmp_path / "data.parquet"
    if importlib.util.find_spec("pyarrow") is None:
        path.write_bytes(b"")
        with pytest.raises(RecipeError, match="no-pyarrow"):
            read_texts(path, spec)
        return
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(arrow.table({"text": ["one", "two"], "n": [1, 2]}), path)
    assert read_texts(path, spec) == ["one", "two"]
    for field in ("n", "missing"):
        with pytest.raises(RecipeError, match="bad-record"):
            read_texts(path, spec.model_copy(update={"text_field": field}))


def test_documents_are_separated_and_cut(tiny: Any, tmp_path: Path) -> None:
    config = read_config(tiny.checkpoint)
    stream = tokenise(["ab", "", "c"], tiny.checkpoint, config, "here")
    assert len(stream) == 5 and stream[2] == stream[4] == 0
    assert cut(stream, 2, 2, "here").tolist() == stream[:4].reshape(2, 2).tolist()
    with pytest.raises(RecipeError, match=r"5 tokens make 1 sequences of 4; 2 are needed"):
        cut(stream, 4, 2, "here")
    with pytest.raises(RecipeError, match="no-tokens"):
        tokenise([""], tiny.checkpoint, config, "here")


def test_wrong_tokenizer_is_refused(tiny: Any) -> None:
    config = read_config(tiny.checkpoint)
    config.text["vocab_size"] = 50
    with pytest.raises(RecipeError, match=r"the tokenizer gives id .* has 50 rows"):
        tokenise(["zzz"], tiny.checkpoint, config, "here")


def test_texts_without_a_token_are_refused(tiny: Any) -> None:
    with pytest.raises(RecipeError, match="no-tokens") as caught:
        tokenise(["", ""], tiny.checkpoint, read_config(tiny.checkpoint), "train.jsonl")
    assert caught.value.where == "train.jsonl"


def test_cache_is_used_and_follows_its_inputs(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.runtime import data

    config = read_config(tiny.checkpoint)
    recipe = Recipe.model_validate({"data": {"train": "a", "held_out": "b"}, "batch": {"sequence_tokens": 16}})
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "hello world, this is text"}) + "\n")
    first = load_sequences(path, recipe, tiny.checkpoint, config, tmp_path / "cache", 1)
    monkeypatch.setattr(data, "tokenise", lambda *args: pytest.fail("tokenised again"))
    again = load_sequences(path, recipe, tiny.checkpoint, config, tmp_path / "cache", 1)
    assert np.array_equal(first, again)
    monkeypatch.undo()
    write(path, json.dumps({"text": "other words of the same kind"}) + "\n")
    assert not np.array_equal(first, load_sequences(path, recipe, tiny.checkpoint, config, tmp_path / "cache", 1))
