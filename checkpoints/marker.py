"""The marker of a folder whose weight files are holes behind their headers."""

from __future__ import annotations

from pathlib import Path

from shardwright.schemas.errors import CheckpointError

HEADERS_ONLY = "shardwright-headers-only.json"


def require_weights(folder: Path) -> None:
    """Refuse to take values from a folder that holds headers only.

    Raises:
        CheckpointError: ``headers-only``.
    """
    if (folder / HEADERS_ONLY).exists():
        raise CheckpointError(
            "headers-only",
            "this folder holds a checkpoint's headers, fetched to plan with; its weights were not fetched",
            where=str(folder),
            next_action="fetch the checkpoint itself and give that folder",
        )
