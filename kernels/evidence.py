"""The store of measured times: JSON lines, keyed by everything a time depends on. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import ValidationError

from shardwright.schemas.errors import KernelError
from shardwright.schemas.files import write_atomic
from shardwright.schemas.ops import MeasuredTime

ROW_DIMENSIONS = frozenset({"T", "R"})
"""Sizes that a batch decides; times hold for a neighbourhood of them. Other sizes belong to the model."""

SHIPPED = Path(__file__).parent / "measured"
"""Times that come with the package, one file a device."""


def shape_bucket(shape: Mapping[str, int]) -> str:
    """The key of a shape: rows rounded up to a power of two, other sizes exact, names sorted.

    ``{"T": 10000, "H": 7168}`` becomes ``H7168,T16384``.
    """
    parts = []
    for name, size in sorted(shape.items()):
        rounded = 1 << max(0, size - 1).bit_length() if name in ROW_DIMENSIONS else size
        parts.append(f"{name}{rounded}")
    return ",".join(parts)


class EvidenceStore:
    """Measured times in one JSONL file; a later time for the same key replaces the earlier."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[MeasuredTime, ...]:
        """All times, in file order; none where the file does not exist.

        Raises:
            KernelError: ``corrupt-evidence``, naming the line.
        """
        if not self.path.exists():
            return ()
        found = []
        for number, line in enumerate(self.path.read_text().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                found.append(MeasuredTime.model_validate_json(line))
            except ValidationError as error:
                raise KernelError(
                    "corrupt-evidence",
                    f"not a measured time: {error.errors()[0]['msg']}",
                    where=f"{self.path}:{number}",
                    next_action="remove the line, or measure again with `shardwright kernels bench`",
                ) from error
        return tuple(found)

    def add(self, times: Iterable[MeasuredTime]) -> None:
        """Add times and write the whole file anew, sorted by key."""
        kept = {self._key(time): time for time in (*self.read(), *times)}
        lines = (json.dumps(kept[key].model_dump(mode="json"), sort_keys=True) for key in sorted(kept))
        write_atomic(self.path, "".join(f"{line}\n" for line in lines).encode())

    def lookup(
        self,
        op: str,
        provider: str,
        pass_name: str,
        device: str,
        shape_bucket: str,
        source_sha256: str,
        dtype: str = "bfloat16",
    ) -> MeasuredTime | None:
        """The time measured for exactly these sources on this device, or ``None``: then it is not evidence."""
        wanted = (op, provider, pass_name, device, shape_bucket, source_sha256, dtype)
        for time in reversed(self.read()):
            if self._key(time)[: len(wanted)] == wanted:
                return time
        return None

    @staticmethod
    def _key(time: MeasuredTime) -> tuple[str, ...]:
        return (
            time.op,
            time.provider,
            time.pass_name,
            time.device,
            time.shape_bucket,
            time.source_sha256,
            time.dtype,
        )
