"""A slice of Kimi K3 as files with contents: what ``k3_model.py`` gives as headers, and a byte tokenizer beside it.

Norms are 1, vectors 0, other plain weights normal with deviation 0.02; packed codes are random under one scale. Bytes
come from one block of each kind, read from a place that differs by tensor, and several threads write them: a file of
40 GB takes as long as the disk, or memory, needs for it.
Legend: V vocabulary of the tokenizer.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import numpy as np
from common.grammar import documents
from common.shards import to_bfloat16_bits, write_json
from common.tokenizer import byte_alphabet, write_tokenizer
from k3_model import BITS, Slice, tensors, write_headers

SPECIAL = ("<|endoftext|>", "<|pad|>")
DEVIATION = 0.02
SCALE = 122
"""E8M0: 2^(122 − 127) times a code's 0 to 6."""
BLOCK = 1 << 24
"""Values of a block that weights are taken from."""
WRITERS = 8
STRIDE = 1_048_583
"""A prime: how far apart in a block the places of two tensors are."""


def write_slice(folder: Path, cut: Slice) -> int:
    """config.json, one safetensors file and a tokenizer; the page cache gives up what was written.

    Returns:
        Bytes of the weights' file.
    """
    path = write_headers(folder, cut) / "model.safetensors"
    with open(path, "r+b") as stream:
        place = 8 + int.from_bytes(stream.read(8), "little")
        written = _write_all(stream.fileno(), place, contents(cut, folder))
        os.fsync(stream.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    options = {"eos_token": SPECIAL[0], "bos_token": SPECIAL[0], "pad_token": SPECIAL[1]}
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1})
    vocabulary = [*SPECIAL, *sorted(byte_alphabet())]
    write_tokenizer(folder, vocabulary=vocabulary, merges=[], special=SPECIAL, split_digits=False, options=options)
    return written


def _write_all(file: int, place: int, pieces: Iterator[memoryview]) -> int:
    """Pieces one behind the other from ``place`` on; the end of the last."""
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(WRITERS) as pool:
        for piece in pieces:
            waiting.append(pool.submit(_write_at, file, piece, place))
            place += piece.nbytes
            if len(waiting) > 4 * WRITERS:
                waiting.popleft().result()
        for one in waiting:
            one.result()
    return place


def _write_at(file: int, piece: memoryview, place: int) -> None:
    while piece:
        done = os.pwrite(file, piece, place)
        piece, place = piece[done:], place + done


def contents(cut: Slice, folder: Path) -> Iterator[memoryview]:
    """The bytes of every tensor in the file's order."""
    draw = np.random.default_rng(20260727)
    normal = draw.standard_normal(BLOCK, dtype=np.float32) * np.float32(DEVIATION)
    blocks = {"F32": normal, "BF16": to_bfloat16_bits(normal), "U8": draw.integers(0, 256, BLOCK, dtype=np.uint8)}
    ones = {"F32": np.ones(1, np.float32), "BF16": to_bfloat16_bits(np.ones(1, np.float32))}
    for number, (name, dtype, shape) in enumerate(tensors(cut, folder)):
        size = prod(shape)
        if name.endswith("_scale"):
            yield memoryview(np.full(size, SCALE, np.uint8))
        elif name.endswith("norm.weight"):
            yield memoryview(np.repeat(ones[dtype], size)).cast("B")
        elif len(shape) < 2:
            yield memoryview(bytes(size * BITS[dtype] // 8))
        else:
            yield from _around(blocks[dtype], number * STRIDE % BLOCK, size)


def _around(block: np.ndarray, start: int, size: int) -> Iterator[memoryview]:
    """``size`` values from ``start`` on, as often around the block as it takes."""
    while size:
        piece = block[start : start + size]
        yield memoryview(piece).cast("B")
        start, size = 0, size - len(piece)


def write_texts(folder: Path, tokens: int) -> None:
    """Training and held-out texts, each of one sequence of ``tokens`` bytes at least."""
    for name, seed in (("train", 1), ("held_out", 2)):
        text = ""
        for one in documents(seed, tokens):
            text += one
            if len(text) > tokens:
                break
        (folder / f"{name}.jsonl").write_text('{"text": "' + text.replace("\n", " ") + '"}\n', encoding="utf-8")
