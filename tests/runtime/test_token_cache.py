"""A kept cache of tokens is what was made from the inputs, or it is made again with a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.checkpoints.config import read_config
from shardwright.runtime import token_cache
from shardwright.runtime.data import load_sequences
from shardwright.runtime.token_cache import cache_key
from shardwright.schemas.recipe import Recipe

RECIPE = Recipe.model_validate({"data": {"train": "a", "held_out": "b"}, "batch": {"sequence_tokens": 16}})


@pytest.fixture
def load(tiny: Any, tmp_path: Path) -> Any:
    """Reads the same file again and again; returns rows and what was told."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "hello world, this is text"}) + "\n")

    def again() -> tuple[list[list[int]], list[str]]:
        told: list[str] = []
        config = read_config(tiny.checkpoint)
        rows = load_sequences(path, RECIPE, tiny.checkpoint, config, tmp_path / "cache", 1, told.append)
        return rows.tolist(), told

    return again


def stored(folder: Path) -> Path:
    (found,) = folder.glob("*.npy")
    return found


def poison(path: Path) -> None:
    """Other ids of the same vocabulary, in a whole and well-formed file."""
    rows = np.load(path)
    np.save(path, np.roll(rows, 1))


def test_poisoned_tokens_are_made_again_with_a_word(load: Any, tmp_path: Path) -> None:
    first, told = load()
    assert told == []
    before = stored(tmp_path / "cache").read_bytes()
    poison(stored(tmp_path / "cache"))
    assert stored(tmp_path / "cache").read_bytes() != before
    again, told = load()
    assert again == first and stored(tmp_path / "cache").read_bytes() == before
    assert len(told) == 1 and "its .npy file hashes to" in told[0] and "made again from the data file" in told[0]
    assert load() == (first, [])


@pytest.mark.parametrize("side", [None, b"{", b"[]", b"{}", b'{".npy": 1}'])
def test_tokens_without_their_digest_are_made_again(load: Any, tmp_path: Path, side: bytes | None) -> None:
    first, _ = load()
    path = stored(tmp_path / "cache").with_suffix(".sha256.json")
    if side is None:
        path.unlink()
    else:
        path.write_bytes(side)
    again, told = load()
    assert again == first and len(told) == 1
    assert load() == (first, [])


def test_a_verified_cache_is_not_made_again(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.runtime import data

    first, _ = load()
    monkeypatch.setattr(data, "tokenise", lambda *arguments: pytest.fail("tokenised again"))
    assert load() == (first, [])


def test_the_name_follows_every_input(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, tokenizer, template, recipe and what makes them; a file that decides nothing changes nothing."""
    checkpoint, path = tmp_path / "checkpoint", tmp_path / "a.jsonl"
    shutil.copytree(tiny.checkpoint, checkpoint)
    path.write_text('{"text": "a"}\n')
    shorter = RECIPE.model_copy(update={"batch": RECIPE.batch.model_copy(update={"sequence_tokens": 8})})
    masked = RECIPE.model_copy(update={"data": RECIPE.data.model_copy(update={"document_mask": True})})

    def key(recipe: Recipe = RECIPE) -> str:
        return cache_key(path, recipe, checkpoint, read_config(checkpoint))

    names = [key(), key(masked)]
    (checkpoint / "README.md").write_text("not part of it")
    assert key() == names[0] == key(shorter), "one stream is cut anew for any length"
    for name in ("chat_template.jinja", "special_tokens_map.json", "tokenizer.json"):
        (checkpoint / name).write_text((checkpoint / name).read_text() + " " if (checkpoint / name).is_file() else "{}")
        names.append(key())
    path.write_text('{"text": "b"}\n')
    names.append(key())
    monkeypatch.setattr(token_cache, "__version__", "0.0.0")
    names.append(key())
    assert len(set(names)) == len(names)


def test_a_run_with_a_poisoned_cache_trains_on_its_own_data(
    tiny: Any, make_job: Any, strategy: Any, single_rank: Any
) -> None:
    """Resumed with other tokens in the cache: the losses are those of the unbroken run, and the record says why."""
    job = make_job(tiny, strategy(), recipe={"schedule": {"steps": 4, "save_every_steps": 2}})
    assert single_rank(job) == 0
    losses = job.losses
    shutil.rmtree(job.run_dir / "checkpoints" / "step-4")
    files = sorted((job.run_dir / "data").glob("*.npy"))
    assert len(files) == 2
    for path in files:
        poison(path)
    assert single_rank(job) == 0
    assert job.losses == losses
    assert sum("the data cache" in line for line in job.record.warnings) == 2
