"""Training text that is on every machine: the sources of Python's standard library.

The split is by file: no file gives text to both sets. Each file is cut at line ends into passages; a set takes
passages in the order of their hash until it is full, so that a few sequences already span many files.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from common.shards import write_json

SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "_bundled",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "lib-dynload",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
"""Not the library, tests, or tables that repeat from file to file (which would leak between the sets)."""
PASSAGE_CHARACTERS = 1200
HELD_OUT_IN = 10
"""One file in ten is held out."""
CAPS = {"train": 512 * 1024, "held_out": 48 * 1024}
"""UTF-8 bytes of text a set may hold."""


def rank(*parts: object) -> int:
    """A stable pseudo-random number of a name: the first 8 bytes of its SHA-256."""
    return int.from_bytes(hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:8], "big")


def source_files(root: Path) -> list[str]:
    """Relative names of the library's modules, sorted; machine-specific build data is left out."""
    names = [path.relative_to(root) for path in root.rglob("*.py") if path.is_file()]
    kept = (name for name in names if SKIPPED_FOLDERS.isdisjoint(name.parts) and "_sysconfigdata" not in name.name)
    return sorted(name.as_posix() for name in kept)


def is_held_out(name: str) -> bool:
    return rank("split", name) % HELD_OUT_IN == 0


def passages(text: str, limit: int = PASSAGE_CHARACTERS) -> Iterator[str]:
    """Runs of whole lines of at most ``limit`` characters; a longer line is dropped."""
    held: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        if size + len(line) > limit and held:
            yield "".join(held)
            held, size = [], 0
        if len(line) <= limit:
            held.append(line)
            size += len(line)
    if held:
        yield "".join(held)


def write_sets(folder: Path) -> None:
    """Write ``train.jsonl``, ``held_out.jsonl`` (``text``, ``file``, ``passage``) and ``files.json``."""
    root = Path(sysconfig.get_path("stdlib"))
    pools: dict[str, list[tuple[int, str, int, str]]] = {"train": [], "held_out": []}
    for name in source_files(root):
        try:
            text = (root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a module in another encoding is no text for this purpose
        pool = pools["held_out" if is_held_out(name) else "train"]
        pool.extend((rank(name, number), name, number, part) for number, part in enumerate(passages(text)))

    used: dict[str, list[str]] = {}
    for kind, pool in pools.items():
        lines: list[str] = []
        names: set[str] = set()
        room = CAPS[kind]
        for _, name, number, text in sorted(pool):
            size = len(text.encode())
            if len(text) < PASSAGE_CHARACTERS // 2 or size > room:
                continue
            lines.append(json.dumps({"text": text, "file": name, "passage": number}) + "\n")
            names.add(name)
            room -= size
        (folder / f"{kind}.jsonl").write_text("".join(lines), encoding="utf-8")
        used[kind] = sorted(names)
    write_json(folder / "files.json", {"python": platform.python_version(), **used})
