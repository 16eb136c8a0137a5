"""Written kernels that passed, kept by hash: none is used before a person has named that hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from shardwright.agents.llm.kernel_writer.judge import Verdict
from shardwright.schemas.base import Model, NonNegative, Sha256
from shardwright.schemas.canonical import sha256_hex
from shardwright.schemas.errors import LlmError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.validation import explain


class Candidate(Model):
    """One kernel, what it is for, and what was seen of it."""

    schema_version: Literal[1] = 1
    source_sha256: Sha256
    region_digest: Sha256
    """Of the canonical region that it computes."""
    region: str
    """The proposal's id."""
    model: str
    """Which model wrote it."""
    judged: str
    """The verdict, in our words."""
    device: str
    ms: NonNegative | None = None
    compile_ms: NonNegative | None = None
    """torch.compile on the same inputs in the same call."""
    approved_by: str = ""
    """Who approved exactly this source; empty means it is not used."""


def keep(folder: Path, source: str, candidate: Candidate) -> Path:
    """Write source and record under the source's hash.

    Raises:
        LlmError: ``not-judged`` for a source that is not the one judged.
    """
    if sha256_hex(source.encode()) != candidate.source_sha256:
        raise LlmError(
            "not-judged", "the source is not the one that was judged", where=candidate.region, next_action="judge it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{candidate.source_sha256[:16]}.json"
    write_atomic(path.with_suffix(".py"), source.encode())
    write_atomic(path, json.dumps(candidate.model_dump(), indent=2, sort_keys=True).encode() + b"\n")
    return path


def load(path: Path) -> tuple[Candidate, str]:
    """A candidate and its source.

    Raises:
        LlmError: ``bad-candidate``, or ``candidate-edited`` where the source is another one now.
    """
    try:
        candidate = Candidate.model_validate_json(path.read_bytes())
        source = path.with_suffix(".py").read_text()
    except (OSError, ValidationError) as error:
        words = explain(error) if isinstance(error, ValidationError) else str(error)
        raise LlmError(
            "bad-candidate",
            f"no record of a written kernel: {words}",
            where=str(path),
            next_action="name the .json file that `kernels write` printed, or write the kernel again",
        ) from error
    if sha256_hex(source.encode()) != candidate.source_sha256:
        raise LlmError(
            "candidate-edited",
            "the source differs from the one that was judged",
            where=path.with_suffix(".py").name,
            next_action="restore it, or judge it again",
        )
    return candidate, source


def approve(path: Path, source_sha256: str, actor: str) -> Candidate:
    """Approve one source by its whole hash.

    Raises:
        LlmError: ``other-hash`` where the hash given is not that of the candidate.
    """
    candidate, _ = load(path)
    if source_sha256 != candidate.source_sha256:
        raise LlmError(
            "other-hash",
            f"the candidate's hash is {candidate.source_sha256[:16]}…, not {source_sha256[:16]}…",
            where=path.name,
            next_action="read the source, then approve its own hash",
        )
    approved = candidate.model_copy(update={"approved_by": actor})
    write_atomic(path, json.dumps(approved.model_dump(), indent=2, sort_keys=True).encode() + b"\n")
    return approved


def usable(path: Path) -> str:
    """The source of an approved candidate.

    Raises:
        LlmError: ``not-approved``, or as ``load``.
    """
    candidate, source = load(path)
    if not candidate.approved_by:
        raise LlmError(
            "not-approved",
            f"kernel {candidate.source_sha256[:16]}… was approved by nobody",
            where=path.name,
            next_action="read it, then approve it by its hash",
        )
    return source


def record(
    source: str,
    region: str,
    region_digest: str,
    model: str,
    device: str,
    verdict: Verdict,
    compile_ms: float | None = None,
) -> Candidate:
    """What is kept of a kernel that passed."""
    return Candidate(
        source_sha256=sha256_hex(source.encode()),
        region_digest=region_digest,
        region=region,
        model=model,
        judged=verdict.because,
        device=device,
        ms=verdict.ms,
        compile_ms=compile_ms,
    )
