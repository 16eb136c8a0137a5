"""Which files of a folder hold weights: the index, its safety, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

from shardwright.checkpoints.config import read_json
from shardwright.schemas.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_INDEX_BYTES = 512 << 20
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,250}\.safetensors")
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def weight_files(folder: Path) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """File names in a stable order, and the index (tensor → file) where the folder has one.

    Raises:
        CheckpointError: ``missing-folder``, ``missing-weights``, ``unsafe-weights``, ``missing-shard``,
            ``unsafe-path``, ``corrupt-index``.
    """
    if not folder.is_dir():
        raise CheckpointError(
            "missing-folder",
            "no such folder",
            where=str(folder),
            next_action="give the folder that holds config.json and the safetensors files",
        )
    if (folder / INDEX_FILE).is_file():
        index = read_index(folder)
        files = tuple(sorted(set(index.values())))
        for name in files:
            check_inside(folder, name)
        return files, index
    if (folder / SINGLE_FILE).is_file():
        check_inside(folder, SINGLE_FILE)
        return (SINGLE_FILE,), None
    raise _nothing_found(folder)


def read_index(folder: Path) -> dict[str, str]:
    """``weight_map`` of the index, every file name proved to be a plain name.

    Raises:
        CheckpointError: ``corrupt-index``, ``unsafe-path``.
    """
    path = folder / INDEX_FILE
    raw = read_json(path, code="corrupt-index", max_bytes=MAX_INDEX_BYTES)
    table = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(table, dict) or not table or any(not isinstance(file, str) for file in table.values()):
        raise CheckpointError(
            "corrupt-index",
            "weight_map should map tensor names to file names",
            where=str(path),
            next_action="fetch the index again",
        )
    for file in set(table.values()):
        if not SAFE_NAME.fullmatch(file):
            raise CheckpointError(
                "unsafe-path",
                f"the index names {file[:200]!r}, which is not a plain safetensors file name",
                where=str(path),
                next_action="do not use this checkpoint; an index may only name files beside it",
            )
    return table


def check_inside(folder: Path, name: str) -> None:
    """A weight file must exist, be a regular file, and lie in the folder.

    Hub caches keep a snapshot's files as links into ``../../blobs``: that one place is allowed as well.

    Raises:
        CheckpointError: ``missing-shard``, ``unsafe-path``.
    """
    path = folder / name
    if not path.exists():
        raise CheckpointError(
            "missing-shard",
            "the index names this file and the folder does not hold it",
            where=str(path),
            next_action="fetch the missing file",
        )
    real = path.resolve()
    home = folder.resolve()
    allowed = (home, home.parent.parent / "blobs")
    if not path.is_file() or not any(real.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            "unsafe-path",
            "a weight file must be a regular file of this folder (or of its hub cache's blobs)",
            where=str(path),
            next_action="replace it by the real file",
        )


def _nothing_found(folder: Path) -> CheckpointError:
    loose = sorted(path.name for path in folder.glob("*.safetensors"))
    if loose:
        return CheckpointError(
            "missing-weights",
            f"{len(loose)} safetensors files (first {loose[0]}) but neither {SINGLE_FILE} nor {INDEX_FILE}",
            where=str(folder),
            next_action=f"fetch {INDEX_FILE} of the same revision",
        )
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_ENDINGS)
    if pickles:
        return CheckpointError(
            "unsafe-weights",
            f"weights only as pickles ({pickles[0]}), which can run code when read",
            where=str(folder),
            next_action="fetch or convert to safetensors on a machine you trust",
        )
    return CheckpointError(
        "missing-weights",
        "the folder holds no safetensors file",
        where=str(folder),
        next_action=f"fetch {SINGLE_FILE} or {INDEX_FILE} and its shards",
    )
