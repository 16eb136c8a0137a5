"""What one run has worked out, for other runs on this machine: an unchanged checkpoint is not parsed twice.

An entry's key holds the node's inputs by hash and the code that made it; every artifact is verified when it is taken.
The cache saves time and decides nothing: whatever comes from it passes the same gates as if it were new.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import shardwright
from shardwright.schemas.canonical import sha256_hex, sha256_of
from shardwright.schemas.files import write_atomic
from shardwright.workflows.artifacts import ArtifactStore, exact_json

VARIABLE = "SHARDWRIGHT_CACHE"
"""A folder, or ``off``."""
ROOMS = ("schemas", "checkpoints", "kernels", "search_spaces", "agents")


def default_cache() -> NodeCache | None:
    """The user's cache, or ``None`` where ``SHARDWRIGHT_CACHE`` is ``off``."""
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return NodeCache(Path(named) if named else home / "shardwright" / "nodes")


@lru_cache(maxsize=1)
def code_sha256() -> str:
    """Hash of every file of the rooms whose results are kept, measured times and catalogues included."""
    total = sha256()
    base = Path(shardwright.__file__).parent
    for room in ROOMS:
        for path in sorted((base / room).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                total.update(f"{path.relative_to(base)}\0".encode() + sha256(path.read_bytes()).digest())
    return total.hexdigest()


class NodeCache:
    """``FOLDER/<key>.json`` with a node's outputs, and ``FOLDER/artifacts/<sha256>.json`` with what they name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, node: str, inputs: Mapping[str, str]) -> Path:
        key = sha256_of({"node": node, "inputs": dict(inputs), "code": code_sha256()})
        return self.folder / f"{node}-{key}.json"

    def take(self, node: str, inputs: Mapping[str, str], store: ArtifactStore) -> dict[str, str] | None:
        """Bring an entry's artifacts into a run's store; ``None`` where there is none or one of them is damaged."""
        path = self.path(node, inputs)
        if not path.is_file():
            return None
        try:
            outputs = {str(name): str(value) for name, value in json.loads(path.read_bytes()).items()}
        except (json.JSONDecodeError, AttributeError):
            return None
        found = {}
        for value in outputs.values():
            artifact = self.folder / "artifacts" / f"{value}.json"
            data = artifact.read_bytes() if artifact.is_file() else b""
            if sha256_hex(data) != value:
                return None
            found[value] = data
        for data in found.values():
            store.put_bytes(data)
        return outputs

    def keep(self, node: str, inputs: Mapping[str, str], outputs: Mapping[str, str], store: ArtifactStore) -> None:
        """Add an entry; its artifacts come first, so that an entry is always whole."""
        for value in outputs.values():
            target = self.folder / "artifacts" / f"{value}.json"
            if not target.is_file():
                write_atomic(target, store.get_bytes(value))
        write_atomic(self.path(node, inputs), exact_json(dict(outputs)))
