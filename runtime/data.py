"""Files of texts, conversations or images to fixed sequences, kept in a cache that follows its inputs.

Legend: N sequences, S tokens a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.checkpoints.config import ModelConfig
from shardwright.runtime.chat import Document, read_conversations, tokenise_conversations
from shardwright.runtime.documents import rows_of_samples, rows_of_stream
from shardwright.runtime.images import Images, cutting_of, image_rows, images_of, open_images
from shardwright.runtime.metrics import say
from shardwright.runtime.records import lines_of
from shardwright.runtime.texts import in_vocabulary, open_tokenizer, packed_ids, read_texts, tokenise, tokenise_texts
from shardwright.runtime.token_cache import cache_key, keep, kept, plain
from shardwright.schemas.errors import RecipeError
from shardwright.schemas.recipe import Recipe


def records_with_images(
    path: Path, recipe: Recipe, checkpoint: Path, config: ModelConfig
) -> Iterator[tuple[Document, list[Any], str]]:
    """Each record's tokens with one placeholder an image, its images, and where it stands.

    Raises:
        RecipeError: ``data-format``, ``bad-record`` and those of the parts.
    """
    spec, where = recipe.data, str(path)
    if spec.format not in ("jsonl-text", "jsonl-messages"):
        raise RecipeError(
            "data-format",
            f"images are read from JSON lines, not from {spec.format!r}",
            where="recipe.data.images_field",
            next_action="convert the data to JSON lines",
        )
    if spec.format == "jsonl-messages":
        tokenizer, _ = open_tokenizer(checkpoint, config)
        conversations = read_conversations(path, spec.messages_field)
        documents = tokenise_conversations(conversations, checkpoint, tokenizer, spec.completion_only)
        in_vocabulary(documents, checkpoint, config)
    else:
        documents = tokenise_texts(read_texts(path, spec), checkpoint, config, where)
    lines = list(lines_of(path))
    if len(lines) != len(documents):
        raise RecipeError(
            "bad-record",
            f"{len(lines) - len(documents)} of {len(lines)} records have no token, so images cannot be told apart",
            where=where,
            next_action="remove empty records",
        )
    for document, (place, line) in zip(documents, lines, strict=True):
        yield document, images_of(line, spec.images_field, place), place


def documents_of(path: Path, recipe: Recipe, checkpoint: Path, config: ModelConfig, images: Path) -> np.ndarray:
    """[N, 3, S] rows of conversations, of unpacked texts, or of packed texts with borders; [N, 4, S] with images.

    Args:
        images: where patches of the data's images are put.

    Raises:
        RecipeError: as the parts.
    """
    spec, tokens = recipe.data, recipe.batch.sequence_tokens
    if spec.images_field:
        return image_rows(path, recipe, records_with_images(path, recipe, checkpoint, config), config, images)
    if spec.format != "jsonl-messages":
        texts = tokenise_texts(read_texts(path, spec), checkpoint, config, str(path))
        if spec.packing:
            return rows_of_stream(texts, tokens)
        return rows_of_samples(texts, tokens, int(texts[0].ids[-1]), str(path), packing=False)
    tokenizer, end = open_tokenizer(checkpoint, config)
    conversations = read_conversations(path, spec.messages_field)
    found = tokenise_conversations(conversations, checkpoint, tokenizer, spec.completion_only)
    in_vocabulary(found, checkpoint, config)
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
    path: Path,
    recipe: Recipe,
    checkpoint: Path,
    config: ModelConfig,
    cache: Path,
    wanted: int,
    told: Callable[[str], None] = say,
) -> np.ndarray:
    """Sequences of a data file, from the cache where they are there already and verified.

    Args:
        wanted: least number of sequences.
        told: hears why a cache that is there is not used.

    Raises:
        RecipeError: ``missing-data``, ``too-little-data`` and those of the parts.
    """
    if not path.is_file():
        raise RecipeError("missing-data", "no such file", where=str(path), next_action="correct recipe.data")
    if recipe.data.format == "packed":
        return cut(packed_ids(path, recipe.data, config), recipe.batch.sequence_tokens, wanted, str(path))
    stored = cache / f"{cache_key(path, recipe, checkpoint, config)}.npy"
    stream = kept(stored, told)
    if stream is None:
        if plain(recipe.data):
            stream = tokenise(read_texts(path, recipe.data), checkpoint, config, str(path))
        else:
            stream = documents_of(path, recipe, checkpoint, config, stored.with_suffix(".images"))
        keep(stored, stream)
    if not plain(recipe.data):
        return _enough(stream, wanted, recipe.batch.sequence_tokens, str(path))
    return cut(stream, recipe.batch.sequence_tokens, wanted, str(path))


def load_images(path: Path, recipe: Recipe, checkpoint: Path, config: ModelConfig, cache: Path) -> Images:
    """The images of a data file that :func:`load_sequences` has read."""
    side = cutting_of(config)[0].side
    return open_images(cache / f"{cache_key(path, recipe, checkpoint, config)}.images", side)
