"""Code of a checkpoint in the workflow: named by hash, pinned in the plan, run in processes of its own.

The workflow's process never imports it. Parsing the structure, resolving targets, verifying, exporting and the check of
the export run in a subprocess that trusts exactly the hashed files; workers trust them by the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shardwright.schemas.errors import UsageError
from shardwright.schemas.plan import RemoteCode
from shardwright.workflows.stages import Stages

T = TypeVar("T")
ISOLATED = ("targets", "balance", "structure", "verify", "export", "check_adapter")
"""Stages that build the model."""


def require_trust(checkpoint: Path, sha256: str) -> None:
    """Check the option of a new request, before anything runs.

    Raises:
        UsageError: ``trust-not-needed`` where transformers builds the model itself.
        CheckpointError: ``remote-code-changed``, ``remote-code-missing``, ``remote-code-size``.
    """
    from shardwright.checkpoints.build import has_transformers_class
    from shardwright.checkpoints.config import read_config
    from shardwright.checkpoints.remote_code import require_code

    require_code(checkpoint, sha256)
    if has_transformers_class(read_config(checkpoint)):
        raise UsageError(
            "trust-not-needed",
            "the installed transformers builds this model: none of the checkpoint's code would run",
            where="--trust-remote-code",
            next_action="leave the option out",
        )


def pinned_code(checkpoint: Path, sha256: str | None) -> RemoteCode | None:
    """What the plan pins; ``None`` where nothing is trusted.

    Raises:
        CheckpointError: ``remote-code-changed``.
    """
    if sha256 is None:
        return None
    from shardwright.checkpoints.remote_code import require_code

    return require_code(checkpoint, sha256)[0]


def run_trusting(checkpoint: Path, sha256: str | None, work: Callable[..., T], *arguments: Any) -> T:
    """``work(*arguments)``: here, or where the checkpoint's code is needed in a process that trusts it."""
    if sha256 is None:
        return work(*arguments)
    from shardwright.checkpoints.remote_code import in_own_process

    return in_own_process(checkpoint, sha256, work, *arguments)


def isolated(stages: Stages, checkpoint: Path, sha256: str | None) -> Stages:
    """The same work, with all that builds the model in processes that trust the code."""
    if sha256 is None:
        return stages
    own = {name: partial(run_trusting, checkpoint, sha256, getattr(stages, name)) for name in ISOLATED}
    return replace(stages, **own)
