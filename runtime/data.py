"""Text to fixed sequences, and which rank reads which: the union of a step is the same on every mesh.

Legend: N sequences, S tokens a sequence, G sequences a step, D data ranks.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.checkpoints.config import ModelConfig
from shardwright.runtime.batch import counted_tokens
from shardwright.runtime.chat import Document, read_conversations, tokenise_conversations
from shardwright.runtime.documents import rows_of_samples, rows_of_stream
from shardwright.schemas.canonical import sha256_file, sha256_of
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.recipe import DataSpec, Recipe


@dataclass(frozen=True)
class Batches:
    """Training sequences in their order.

    Attributes:
        sequences: [N, S] token ids, or [N, 3, S] planes of ids, labels and positions (``documents``).
        per_step: G.
        data_ranks: D; divides G.
        micro: sequences of one micro-batch.
        seed: ``recipe.seeds.data``.
    """

    sequences: np.ndarray
    per_step: int
    data_ranks: int
    micro: int
    seed: int

    def indices(self, step: int) -> list[int]:
        """The G sequences of a step (first is 1): shuffled epochs, one after another, without gaps."""
        total = len(self.sequences)
        first = (step - 1) * self.per_step
        picked: list[int] = []
        while len(picked) < self.per_step:
            epoch, offset = divmod(first + len(picked), total)
            picked += self._order(epoch)[offset : offset + self.per_step - len(picked)]
        return picked

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self.seed << 32) + epoch)
        return torch.randperm(len(self.sequences), generator=generator).tolist()

    def global_batch(self, step: int) -> Tensor:
        """[G, S] (or [G, 3, S]), for references in one process."""
        return self._take(self.indices(step))

    def tokens(self, step: int) -> int:
        """Labels of a step that count, over all ranks."""
        return counted_tokens(self.sequences[np.asarray(self.indices(step))])

    def micro_batches(self, step: int, data_rank: int) -> list[Tensor]:
        """This rank's share of a step, [micro, S] (or [micro, 3, S]) each."""
        share = self.per_step // self.data_ranks
        mine = self.indices(step)[data_rank * share : (data_rank + 1) * share]
        return [self._take(mine[start : start + self.micro]) for start in range(0, share, self.micro)]

    def _take(self, picked: list[int]) -> Tensor:
        return torch.from_numpy(self.sequences[np.asarray(picked)].astype(np.int64))


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
    _in_vocabulary(documents, checkpoint, config)
    return documents


def _in_vocabulary(documents: list[Document], checkpoint: Path, config: ModelConfig) -> None:
    vocabulary, largest = config.count("vocab_size"), max(int(one.ids.max()) for one in documents)
    if vocabulary and largest >= vocabulary:
        raise RecipeError(
            "wrong-tokenizer",
            f"the tokenizer gives id {largest}, the model knows {vocabulary}",
            where=str(checkpoint / "tokenizer.json"),
            next_action="use the tokenizer that belongs to this checkpoint",
        )


def plain(spec: DataSpec) -> bool:
    """Whether rows are ids alone: texts in one stream, without borders."""
    return spec.format != "jsonl-messages" and spec.packing and not spec.document_mask


def documents_of(path: Path, recipe: Recipe, checkpoint: Path, config: ModelConfig) -> np.ndarray:
    """[N, 3, S] rows of conversations, of unpacked texts, or of packed texts with borders.

    Raises:
        RecipeError: as the parts.
    """
    spec, tokens = recipe.data, recipe.batch.sequence_tokens
    if spec.format != "jsonl-messages":
        texts = tokenise_texts(read_texts(path, spec), checkpoint, config, str(path))
        if spec.packing:
            return rows_of_stream(texts, tokens)
        return rows_of_samples(texts, tokens, int(texts[0].ids[-1]), str(path), packing=False)
    tokenizer, end = open_tokenizer(checkpoint, config)
    conversations = read_conversations(path, spec.messages_field)
    found = tokenise_conversations(conversations, checkpoint, tokenizer, spec.completion_only)
    _in_vocabulary(found, checkpoint, config)
    return rows_of_samples(found, tokens, end, str(path), packing=spec.packing)


def cut(stream: np.ndarray, sequence_tokens: int, wanted: int, where: str) -> np.ndarray:
    """[N, S] consecutive pieces; the tail that does not fill one is left out.

    Raises:
        RecipeError: ``too-little-data``.
    """
    rows = len(stream) // sequence_tokens
    if rows < wanted:
        raise RecipeError(
            "too-little-data",
            f"{len(stream)} tokens make {rows} sequences of {sequence_tokens}; {wanted} are needed",
            where=where,
            next_action="give more text, or lower sequence_tokens, the batch or held_out_sequences",
        )
    return stream[: rows * sequence_tokens].reshape(rows, sequence_tokens)


def _enough(rows: np.ndarray, wanted: int, sequence_tokens: int, where: str) -> np.ndarray:
    if len(rows) < wanted:
        raise RecipeError(
            "too-little-data",
            f"the documents make {len(rows)} sequences of {sequence_tokens}; {wanted} are needed",
            where=where,
            next_action="give more documents, or lower sequence_tokens, the batch or held_out_sequences",
        )
    return rows


def load_sequences(
    path: Path, recipe: Recipe, checkpoint: Path, config: ModelConfig, cache: Path, wanted: int
) -> np.ndarray:
    """Sequences of a data file, from the cache where they are there already.

    The cache's key covers file, tokenizer, format and sequence length.
    """
    if not path.is_file():
        raise RecipeError("missing-data", "no such file", where=str(path), next_action="correct recipe.data")
    tokenizer = checkpoint / "tokenizer.json"
    templates = [checkpoint / name for name in ("chat_template.jinja", "tokenizer_config.json")]
    key = sha256_of(
        {
            "data": sha256_file(path),
            "tokenizer": sha256_file(tokenizer) if tokenizer.is_file() else "",
            "spec": recipe.data.model_dump(mode="json", exclude={"train", "held_out"}),
            "config_eos": str(config.raw.get("eos_token_id")),
            "tokens": 0 if plain(recipe.data) else recipe.batch.sequence_tokens,
            "templates": [sha256_file(one) if one.is_file() else "" for one in templates],
        },
        floats=False,
    )
    stored = cache / f"{key}.npy"
    if stored.is_file():
        stream = np.load(stored, mmap_mode="r")
    elif plain(recipe.data):
        stream = tokenise(read_texts(path, recipe.data), checkpoint, config, str(path))
        _save(stored, stream)
    else:
        stream = documents_of(path, recipe, checkpoint, config)
        _save(stored, stream)
    if not plain(recipe.data):
        return _enough(stream, wanted, recipe.batch.sequence_tokens, str(path))
    return cut(stream, recipe.batch.sequence_tokens, wanted, str(path))


def _save(path: Path, stream: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        np.save(file, stream)
    os.replace(temporary, path)
