"""Files of texts, and the tokens of each document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.checkpoints.config import ModelConfig
from shardwright.runtime.chat import Document
from shardwright.runtime.records import column_of, json_of, lines_of, open_packed, text_of
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.recipe import DataSpec

ENCODED_AT_ONCE = 8 << 20
"""Characters that are tokenised together: what a tokenizer says of a token takes some hundred times its bytes."""


def read_texts(path: Path, spec: DataSpec) -> list[str]:
    """Documents of a data file.

    Raises:
        RecipeError: ``missing-data``, ``data-format``, ``bad-record``, ``empty-data``.
    """
    if spec.format == "parquet-text":
        return _parquet(path, spec.text_field)
    if spec.format != "jsonl-text":
        raise RecipeError(
            "data-format",
            f"data of format {spec.format!r} holds no plain texts",
            where="recipe.data.format",
            next_action="give JSON lines with one text field, or parquet",
        )
    texts = [text_of(line, spec.text_field, where) for where, line in lines_of(path)]
    if not any(texts):
        raise RecipeError(
            "empty-data",
            "the file holds no text",
            where=str(path),
            next_action="give a file with at least one document",
        )
    return texts


def _parquet(path: Path, field: str) -> list[str]:
    """One column of a parquet file."""
    texts = column_of(path, field)
    wrong = next((place for place, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None or not any(texts):
        what = "the column holds no text" if wrong is None else f"row {wrong + 1} holds {type(texts[wrong]).__name__}"
        raise RecipeError("bad-record", what, where=str(path), next_action="give a column of texts")
    return texts


def open_tokenizer(checkpoint: Path, config: ModelConfig) -> tuple[Any, int]:
    """The checkpoint's tokenizer, and the id that ends a document.

    Raises:
        RecipeError: ``no-tokenizer``, ``bad-tokenizer``, ``no-end-token``.
    """
    from tokenizers import Tokenizer

    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        raise RecipeError(
            "no-tokenizer",
            "the checkpoint has no tokenizer.json",
            where=str(checkpoint),
            next_action="fetch the tokenizer's files",
        )
    end = config.get("eos_token_id", default=config.raw.get("eos_token_id"))
    end = end[0] if isinstance(end, list) and end else end
    if not isinstance(end, int):
        raise RecipeError(
            "no-end-token",
            f"eos_token_id is {end!r}",
            where=str(checkpoint / "config.json"),
            next_action="set eos_token_id; documents are separated by it",
        )
    if not isinstance(json_of(path, "bad-tokenizer").get("model"), dict):
        raise RecipeError(
            "bad-tokenizer",
            "tokenizer.json has no model",
            where=str(path),
            next_action="fetch this file again",
        )
    return Tokenizer.from_file(str(path)), end


def tokenise(texts: list[str], checkpoint: Path, config: ModelConfig, where: str) -> np.ndarray:
    """All documents as one stream of ids, an end-of-text id after each.

    Raises:
        RecipeError: ``no-tokens``, ``wrong-tokenizer``, ``no-tokenizer``, ``no-end-token``.
    """
    return np.concatenate([one.ids for one in tokenise_texts(texts, checkpoint, config, where)])


def tokenise_texts(texts: list[str], checkpoint: Path, config: ModelConfig, where: str) -> list[Document]:
    """Each text with its end-of-text id; every token counts.

    Raises:
        RecipeError: as :func:`tokenise`.
    """
    tokenizer, end = open_tokenizer(checkpoint, config)
    pieces = [
        np.asarray([*item.ids, end], dtype=np.int64)
        for some in _few_at_once(texts)
        for item in tokenizer.encode_batch(some, add_special_tokens=False)
        if item.ids
    ]
    if not pieces:
        raise RecipeError("no-tokens", "tokenising gives no token", where=where, next_action="give a file with text")
    documents = [Document(piece, np.ones(len(piece), dtype=bool)) for piece in pieces]
    in_vocabulary(documents, checkpoint, config)
    return documents


def _few_at_once(texts: list[str]) -> Iterator[list[str]]:
    """Texts in order, with at most ``ENCODED_AT_ONCE`` characters together, one at least."""
    some: list[str] = []
    room = ENCODED_AT_ONCE
    for text in texts:
        if some and len(text) > room:
            yield some
            some, room = [], ENCODED_AT_ONCE
        some.append(text)
        room -= len(text)
    if some:
        yield some


def packed_ids(path: Path, spec: DataSpec, config: ModelConfig) -> np.ndarray:
    """[tokens] ids that the user made, mapped from the file.

    Raises:
        RecipeError: as :func:`~shardwright.runtime.records.open_packed`; ``wrong-tokenizer``.
    """
    ids = open_packed(path, spec)
    _within(int(ids.min()), int(ids.max()), config, "the file holds", str(path))
    return ids


def in_vocabulary(documents: list[Document], checkpoint: Path, config: ModelConfig) -> None:
    """Refuse ids that the model has no row for.

    Raises:
        RecipeError: ``wrong-tokenizer``.
    """
    largest = max(int(one.ids.max()) for one in documents)
    _within(0, largest, config, "the tokenizer gives", str(checkpoint / "tokenizer.json"))


def _within(smallest: int, largest: int, config: ModelConfig, who: str, where: str) -> None:
    vocabulary = config.count("vocab_size")
    if smallest < 0 or (vocabulary and largest >= vocabulary):
        raise RecipeError(
            "wrong-tokenizer",
            f"{who} id {smallest if smallest < 0 else largest}, the model's embedding has {vocabulary} rows, ids 0 to "
            f"{vocabulary - 1}",
            where=where,
            next_action="use the tokenizer that belongs to this checkpoint",
        )
