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
    with pytest.raises(RecipeError) as caught:
        read_texts(write(tmp_path / "data.jsonl", text), SPEC)
    assert caught.value.code == f"recipe/{code}" and "data.jsonl" in caught.value.where


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
