"""Measured times that fusions are ranked by: those that come with the package, and files of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from shardwright.kernels import evidence
from shardwright.schemas.canonical import sha256_file
from shardwright.schemas.ops import MeasuredTime, PassName

MEASURED_PASSES: tuple[PassName, ...] = ("fwd+dx", "fwd+bwd")
"""Passes of a measured time that may stand for a step, best first."""

Key = tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """A measured time, and the file of the user's own that holds it."""

    time: MeasuredTime
    file: str = ""
    """SHA-256 of the file; empty where the time came with the package."""

    @property
    def basis(self) -> str:
        """Everything that a reader needs to find the time again."""
        time = self.time
        place = f"evidence file {self.file[:16]}…" if self.file else "shipped"
        return (
            f"measured on {time.device}, {time.date}, {time.shape_bucket}, {time.pass_name}, {time.repeats} repeats; "
            f"{place}"
        )


def shipped_evidence() -> tuple[Path, ...]:
    """Files of measured times that come with the package."""
    return tuple(sorted(evidence.SHIPPED.glob("*.jsonl")))


def find(
    op: str, provider: str, shape: Mapping[str, int], device: str, dtype: str, files: tuple[Path, ...]
) -> Seen | None:
    """The time of an operator's present sources, from the last file that has one.

    Args:
        shape: the operator's named sizes; rows count as their power of two.
        device: a device's name, as torch says it.
        files: JSON lines; what a later file says goes before what an earlier one says of the same case.

    Raises:
        KernelError: ``corrupt-evidence``.
    """
    from shardwright.kernels.registry import OPERATORS, source_sha256

    if not files or op not in OPERATORS:
        return None
    bucket, sources = evidence.shape_bucket(shape), source_sha256(op)
    for path in reversed(files):
        times = _times(path)
        for pass_name in MEASURED_PASSES:
            if (time := times.get((op, provider, pass_name, device, bucket, sources, dtype))) is not None:
                return Seen(time, "" if path.parent == evidence.SHIPPED else sha256_file(path))
    return None


def verified(op: str, files: tuple[Path, ...] = ()) -> bool:
    """Whether a time of ours stands for the operator's present source, shipped or in one of ``files``.

    What writes such files times only what it has verified on the same device, so that a time stands for a verification.
    """
    from shardwright.kernels.registry import source_sha256

    wanted = (op, "shardwright", source_sha256(op))
    return any(
        (time.op, time.provider, time.source_sha256) == wanted
        for path in (*shipped_evidence(), *files)
        for time in _times(path).values()
    )


def _times(path: Path) -> Mapping[Key, MeasuredTime]:
    """A file's times by all that they depend on; of two alike the later."""
    return _read(path, sha256_file(path))


@lru_cache(maxsize=16)
def _read(path: Path, sha256: str) -> Mapping[Key, MeasuredTime]:
    """Read once for each content."""
    return {
        (time.op, time.provider, time.pass_name, time.device, time.shape_bucket, time.source_sha256, time.dtype): time
        for time in evidence.EvidenceStore(path).read()
    }
