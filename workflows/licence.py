"""The licence that a checkpoint states about itself. Only an identifier is taken, never text."""

from __future__ import annotations

import re
from pathlib import Path

LONGEST = 64 * 1024
_FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
_FIELD = re.compile(r"^license:[ \t]*[\"']?([A-Za-z0-9][A-Za-z0-9.+_-]{0,63})[\"']?[ \t]*\r?$", re.MULTILINE)


def stated_licence(folder: Path) -> str:
    """``apache-2.0`` from the front matter of ``README.md``; empty where there is none or it is no identifier."""
    path = folder / "README.md"
    if not path.is_file():
        return ""
    with open(path, "rb") as stream:
        text = stream.read(LONGEST).decode("utf-8", errors="replace")
    front = _FRONT.match(text)
    found = _FIELD.search(front.group(1)) if front is not None else None
    return found.group(1).lower() if found is not None else ""
