"""Files of texts, and the tokens of each document."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.checkpoints.config import ModelConfig
from shardwright.runtime.chat import Document
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.recipe import DataSpec


def read_texts(path: Path, spec: DataSpec) -> list[str]:
    """Documents of a data file.

    Raises:
        RecipeError: ``missing-data``, ``data-format``, ``bad-record``, ``empty-data``.
    """
    if not path.is_file():
        raise RecipeError("missing-data", "no such file", where=str(path), next_action="correct recipe.data")
    if spec.format == "parquet-text":
        return _parquet(path, spec.text_field)
    if spec.format != "jsonl-text":
        raise RecipeError(
            "data-format",
            f"format {spec.format!r} is not read by this version",
            where="recipe.data.format",
            next_action="convert the data to JSON lines with one text field",
        )
    texts = []
    with open(path, encoding="utf-8", errors="strict") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            texts.append(_text_of(line, spec.text_field, f"{path}:{number}"))
    if not any(texts):
        raise RecipeError(
            "empty-data",
            "the file holds no text",
            where=str(path),
            next_action="give a file with at least one document",
        )
    return texts


def _text_of(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise RecipeError(
            "bad-record", f"not JSON: {error}", where=where, next_action="correct or remove this line"
        ) from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise RecipeError(
            "bad-record",
            f"no text under {field!r}, found {type(text).__name__}",
            where=where,
            next_action="correct this line, or recipe.data.text_field",
        )
    return text


def _parquet(path: Path, field: str) -> list[str]:
    """One column of a parquet file."""
    if importlib.util.find_spec("pyarrow") is None:
        raise RecipeError(
            "no-pyarrow",
            "parquet is read by pyarrow, which is not installed",
            where=str(path),
            next_action="install pyarrow, or convert the data to JSON lines",
        )
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        texts: list[Any] = parquet.read_table(path, columns=[field]).column(field).to_pylist()
    except (arrow.ArrowException, KeyError, OSError) as error:
        raise RecipeError(
            "bad-record",
            f"no column {field!r} can be read: {error}"[:500],
            where=str(path),
            next_action="correct recipe.data.text_field, or the file",
        ) from error
    wrong = next((place for place, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None or not any(texts):
        what = "the column holds no text" if wrong is None else f"row {wrong + 1} holds {type(texts[wrong]).__name__}"
        raise RecipeError("bad-record", what, where=str(path), next_action="give a column of texts")
    return texts


def open_tokenizer(checkpoint: Path, config: ModelConfig) -> tuple[Any, int]:
    """The checkpoint's tokenizer, and the id that ends a document.

    Raises:
        RecipeError: ``no-tokenizer``, ``no-end-token``.
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
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    pieces = [np.asarray([*item.ids, end], dtype=np.int64) for item in encoded if item.ids]
    if not pieces:
        raise RecipeError("no-tokens", "tokenising gives no token", where=where, next_action="give a file with text")
    documents = [Document(piece, np.ones(len(piece), dtype=bool)) for piece in pieces]
    in_vocabulary(documents, checkpoint, config)
    return documents


def in_vocabulary(documents: list[Document], checkpoint: Path, config: ModelConfig) -> None:
    """Refuse ids that the model has no row for.

    Raises:
        RecipeError: ``wrong-tokenizer``.
    """
    vocabulary, largest = config.count("vocab_size"), max(int(one.ids.max()) for one in documents)
    if vocabulary and largest >= vocabulary:
        raise RecipeError(
            "wrong-tokenizer",
            f"the tokenizer gives id {largest}, the model's embedding has {vocabulary} rows, ids 0 to {vocabulary - 1}",
            where=str(checkpoint / "tokenizer.json"),
            next_action="use the tokenizer that belongs to this checkpoint",
        )
