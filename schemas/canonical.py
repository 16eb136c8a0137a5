"""Canonical JSON: one byte string for one value, and the hash of it."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from shardwright.schemas.errors import PlanError

SIGNIFICANT_DIGITS = 6


def _plain(value: Any, floats: bool, where: str) -> Any:
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(mode="json"), floats, where)
    if isinstance(value, dict):
        return {str(k): _plain(v, floats, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, floats, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, float):
        if not floats:
            raise PlanError(
                "decision-float",
                f"a binary float ({value!r}) stands in hashed decision bytes",
                where=where,
                next_action="store the value as an integer or as decimal text",
            )
        if not math.isfinite(value):
            raise PlanError(
                "not-finite",
                f"{value!r} has no canonical form",
                where=where,
                next_action="fix the producer of this number",
            )
        return round_significant(value)
    return value


def round_significant(value: float, digits: int = SIGNIFICANT_DIGITS) -> float:
    """Round to ``digits`` significant decimal digits (half to even, as ``%g`` does)."""
    return float(f"{value:.{digits}g}")


def canonical_bytes(value: Any, *, floats: bool = True) -> bytes:
    """Sorted keys, no spaces, UTF-8, floats at six significant digits.

    Args:
        value: a model or any JSON-like value.
        floats: ``False`` refuses every binary float (decision bytes).

    Raises:
        PlanError: ``decision-float`` or ``not-finite``, naming the field.
    """
    plain = _plain(value, floats, "$")
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of(value: Any, *, floats: bool = True) -> str:
    """The hash of a value's canonical bytes."""
    return sha256_hex(canonical_bytes(value, floats=floats))


def sha256_file(path: Path) -> str:
    """The hash of a file's bytes, read in 4 MiB pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def pretty_bytes(value: Any) -> bytes:
    """Canonical values in readable form: sorted keys, two spaces, one final newline."""
    plain = _plain(value, True, "$")
    text = json.dumps(plain, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()
