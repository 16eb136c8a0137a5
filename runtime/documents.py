"""Documents in fixed sequences: no attention and no prediction across their borders.

A row has three planes [3, S]: ids; labels (the next token of the same document where the loss counts it, else
``IGNORE``); positions, which start at 0 with every document. transformers builds its block-diagonal masks from
positions that start anew; what a family does with them is checked on the live model (``checks/documents.py``).
Legend: N rows, S tokens a row.
"""

from __future__ import annotations

import numpy as np

from shardwright.runtime.batch import IGNORE
from shardwright.runtime.chat import Document
from shardwright.schemas.errors import RecipeError


def rows_of_stream(documents: list[Document], sequence_tokens: int) -> np.ndarray:
    """[N, 3, S]: documents one after another, cut wherever a row ends; the tail is left out."""
    ids = np.concatenate([one.ids for one in documents])
    counted = np.concatenate([one.counted for one in documents])
    number = np.repeat(np.arange(len(documents)), [len(one.ids) for one in documents])
    rows = len(ids) // sequence_tokens
    shape, used = (rows, sequence_tokens), rows * sequence_tokens
    return planes(ids[:used].reshape(shape), number[:used].reshape(shape), counted[:used].reshape(shape))


def rows_of_samples(
    documents: list[Document], sequence_tokens: int, pad: int, where: str, *, packing: bool
) -> np.ndarray:
    """[N, 3, S]: whole documents; with packing, a row takes the next ones while they fit. Padding is never counted.

    Raises:
        RecipeError: ``over-long-sample``.
    """
    rows: list[list[Document]] = []
    room = 0
    for place, document in enumerate(documents):
        length = len(document.ids)
        if length > sequence_tokens:
            raise RecipeError(
                "over-long-sample",
                f"sample {place + 1} has {length} tokens, a sequence holds {sequence_tokens}",
                where=document.where or where,
                next_action="raise recipe.batch.sequence_tokens, or shorten or remove this sample",
            )
        if not packing or length > room:
            rows.append([])
            room = sequence_tokens
        rows[-1].append(document)
        room -= length
    shape = (len(rows), sequence_tokens)
    ids, number = np.full(shape, pad, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    counted = np.zeros(shape, dtype=bool)
    for row, held in enumerate(rows):
        start = 0
        for place, document in enumerate(held):
            part = slice(start, start + len(document.ids))
            ids[row, part], number[row, part], counted[row, part] = document.ids, place, document.counted
            start = part.stop
    return planes(ids, number, counted)


def planes(ids: np.ndarray, number: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """[N, S] ids, document numbers and counted flags → [N, 3, S] int64."""
    labels = np.full_like(ids, IGNORE)
    same = (number[:, 1:] == number[:, :-1]) & counted[:, 1:]
    labels[:, :-1] = np.where(same, ids[:, 1:], IGNORE)
    place = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    border = np.ones_like(ids, dtype=bool)
    border[:, 1:] = number[:, 1:] != number[:, :-1]
    positions = place - np.maximum.accumulate(np.where(border, place, 0), axis=1)
    return np.stack((ids, labels, positions), axis=1).astype(np.int64)
