"""Hashes of everything that decides how a checkpoint is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from shardwright.checkpoints.config import CONFIG_FILE, read_config
from shardwright.checkpoints.headers import Headers, read_headers
from shardwright.schemas.canonical import sha256_file, sha256_of
from shardwright.schemas.profile import CheckpointFingerprint

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files that decide token ids or the chat template."""


def fingerprint(folder: Path, headers: Headers | None = None) -> CheckpointFingerprint:
    """Fingerprint a folder; weights are not read.

    Args:
        folder: the checkpoint.
        headers: its headers, if they were read already.

    Raises:
        CheckpointError: as :func:`read_config` and :func:`read_headers`.
    """
    folder = Path(folder)
    read_config(folder)
    headers = headers or read_headers(folder)
    parts = {
        "config_sha256": sha256_file(folder / CONFIG_FILE),
        "headers_sha256": headers_sha256(headers),
        "tokenizer_sha256": _tokenizer_sha256(folder),
        "total_file_bytes": sum(headers.files.values()),
    }
    return CheckpointFingerprint(**parts, digest=sha256_of(parts, floats=False))


def headers_sha256(headers: Headers) -> str:
    """One line a tensor (name, dtype, shape, file, offsets), sorted by name, hashed."""
    digest = hashlib.sha256()
    for name in sorted(headers.tensors):
        tensor = headers.tensors[name]
        fields = (name, tensor.dtype, *tensor.shape, tensor.file, tensor.start, tensor.end)
        digest.update("\x00".join(map(str, fields)).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _tokenizer_sha256(folder: Path) -> str | None:
    found = {name: sha256_file(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    return sha256_of(found, floats=False) if found else None
