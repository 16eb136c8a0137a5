"""Sequences kept from an earlier start: bound to what they were made from by their name, to their bytes by a digest.

``KEY.npy`` (and ``KEY.images``, ``KEY.grids``) stand beside ``KEY.sha256.json``, which is written before them. Files
that are not what it says are made again, with a word. It keeps out files that were damaged, mixed up or half copied;
whoever may write the run's folder can write both, and the saves beside them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shardwright import __version__
from shardwright.checkpoints.config import ModelConfig
from shardwright.checkpoints.fingerprint import TOKENIZER_FILES
from shardwright.runtime.images import cutting_of
from shardwright.schemas.canonical import sha256_file, sha256_of
from shardwright.schemas.files import write_atomic
from shardwright.schemas.recipe import DataSpec, Recipe

DIGESTS = ".sha256.json"
IMAGE_FILES = (".images", ".grids")


def plain(spec: DataSpec) -> bool:
    """Whether rows are ids alone: texts in one stream, without borders."""
    return spec.format != "jsonl-messages" and spec.packing and not spec.document_mask and not spec.images_field


def cache_key(path: Path, recipe: Recipe, checkpoint: Path, config: ModelConfig) -> str:
    """Covers the data file, the tokenizer's files and library, the recipe's part of the work, and our own version."""
    import tokenizers

    files = {name: sha256_file(checkpoint / name) for name in TOKENIZER_FILES if (checkpoint / name).is_file()}
    return sha256_of(
        {
            "data": sha256_file(path),
            "tokenizer": files,
            "spec": recipe.data.model_dump(mode="json", exclude={"train", "held_out"}),
            "config_eos": [str(config.raw.get("eos_token_id")), str(config.get("eos_token_id", default=None))],
            "images": str(cutting_of(config)) if recipe.data.images_field else "",
            "tokens": 0 if plain(recipe.data) else recipe.batch.sequence_tokens,
            "made_by": [__version__, tokenizers.__version__],
        },
        floats=False,
    )


def kept(stored: Path, told: Callable[[str], None]) -> np.ndarray | None:
    """The rows under a name, mapped from a file whose bytes were verified; ``None`` where they must be made.

    Args:
        stored: ``KEY.npy``.
        told: hears why files that are there are not used.
    """
    if not stored.is_file():
        return None
    wrong = _wrong(stored)
    if wrong:
        told(f"the data cache {stored.name[:12]}… is not used: {wrong}; its tokens are made again from the data file")
        return None
    rows: np.ndarray = np.load(stored, mmap_mode="r", allow_pickle=False)
    return rows


def keep(stored: Path, rows: np.ndarray) -> None:
    """Put rows under a name; images that belong to them are there already."""
    stored.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=stored.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, rows)
        digests = {stored.suffix: sha256_file(Path(name))}
        for suffix in IMAGE_FILES:
            if stored.with_suffix(suffix).is_file():
                digests[suffix] = sha256_file(stored.with_suffix(suffix))
        write_atomic(stored.with_suffix(DIGESTS), json.dumps(digests, sort_keys=True).encode() + b"\n")
        os.replace(name, stored)
    finally:
        Path(name).unlink(missing_ok=True)


def _wrong(stored: Path) -> str:
    """What is wrong with the files under a name; empty where nothing is."""
    side = stored.with_suffix(DIGESTS)
    try:
        digests = json.loads(side.read_bytes()) if side.is_file() else None
    except ValueError:
        digests = None
    if not isinstance(digests, dict) or stored.suffix not in digests:
        return f"{side.name[64:]} does not tell its digest" if side.is_file() else "it has no digest"
    for suffix, digest in sorted(digests.items()):
        path = stored.with_suffix(suffix)
        if not path.is_file():
            return f"its {suffix} file is missing"
        found = sha256_file(path)
        if found != digest:
            return f"its {suffix} file hashes to {found[:16]}…, its digest is {str(digest)[:16]}…"
    return ""
