"""The checkpoint that a command names: a folder that is here or an address, with weights or only their headers."""

from __future__ import annotations

import json
from pathlib import Path

from shardwright.checkpoints.marker import HEADERS_ONLY
from shardwright.schemas.errors import CheckpointError


def checkpoint_folder(checkpoint: Path, *, offline: bool = False) -> Path:
    """The folder of a checkpoint: one that is here, or that of the fetched headers of an ``hf://`` address.

    Raises:
        CheckpointError: ``offline``, ``missing-folder``, or as ``checkpoints.hub``.
    """
    from shardwright.checkpoints.hub import resolve_checkpoint

    if offline and on_hub(checkpoint):
        raise CheckpointError(
            "offline",
            "the checkpoint is on a hub, and --offline asks no other machine",
            where=_address(checkpoint),
            next_action="name a local folder, or leave --offline out",
        )
    return local_checkpoint(resolve_checkpoint(checkpoint))


def local_checkpoint(checkpoint: Path) -> Path:
    """The folder of a checkpoint that is here.

    Raises:
        CheckpointError: ``headers-only`` of an address, ``missing-folder``.
    """
    if on_hub(checkpoint):
        raise CheckpointError(
            "headers-only",
            "an address has no weights to train with",
            where=_address(checkpoint),
            next_action="download the checkpoint, and name its folder",
        )
    if not checkpoint.is_dir():
        raise CheckpointError(
            "missing-folder",
            "this is a file, not a folder" if checkpoint.is_file() else "no such folder",
            where=str(checkpoint),
            next_action="name the folder with config.json",
        )
    return checkpoint.resolve()


def demand_weights(folder: Path) -> None:
    """The folder holds weights, not only their headers.

    Raises:
        CheckpointError: ``headers-only``, with the command that fetches them.
    """
    marker = folder / HEADERS_ONLY
    if not marker.is_file():
        return
    facts = json.loads(marker.read_bytes())
    repo = str(facts["address"]).removeprefix("hf://").partition("@")[0]
    raise CheckpointError(
        "headers-only",
        "only the headers of this checkpoint were fetched; training needs its weights",
        where=str(facts["address"]),
        next_action=f"`hf download {repo} --revision {facts['commit']} --local-dir DIR`, then `shardwright apply PLAN "
        "--checkpoint DIR`: the plan holds for that copy",
    )


def on_hub(checkpoint: Path) -> bool:
    """Whether a checkpoint is named by address."""
    return str(checkpoint).startswith("hf:/")


def _address(checkpoint: Path) -> str:
    """An address whose two slashes a path type has folded into one."""
    return "hf://" + str(checkpoint).removeprefix("hf:").lstrip("/")
