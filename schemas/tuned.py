"""Launch choices of the fused operators on one device: data that a plan pins with the operators' code."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from shardwright.schemas.base import Identifier, Model, Positive, Sha256


class TunedEntry(Model):
    """The fastest right choice for one kernel at one shape bucket, and what it was compared with."""

    op: Identifier
    kernel: Identifier
    bucket: str
    choice: dict[str, int | bool]
    """Fields of the operator's own configuration; fields not named keep the default in code."""
    code_sha256: Sha256
    """Sources of the operator that the choice was timed with; for others the default in code stands."""
    median_ms: Positive
    default_ms: Positive
    """The default in code, timed in the same run."""
    candidates: int
    """Choices tried, wrong and failing ones included."""


class TunedFile(Model):
    """All choices for one device, sorted by operator, kernel and bucket."""

    schema_version: Literal[1] = 1
    device: str
    versions: dict[str, str]
    """``torch``, ``triton`` and ``driver`` of the last run that wrote entries."""
    entries: tuple[TunedEntry, ...]

    @field_validator("entries")
    @classmethod
    def _one_entry_a_key(cls, entries: tuple[TunedEntry, ...]) -> tuple[TunedEntry, ...]:
        keys = [(e.op, e.kernel, e.bucket) for e in entries]
        if len(set(keys)) != len(keys):
            raise ValueError("two entries have one operator, kernel and bucket")
        return entries
