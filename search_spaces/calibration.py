"""Measured curves of a machine, read by path and named by hash."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from shardwright.schemas.canonical import sha256_of
from shardwright.schemas.cluster import Calibration, CurvePoint
from shardwright.schemas.errors import ClusterError
from shardwright.schemas.validation import explain


def load_calibration(path: Path, expected_sha256: str | None = None) -> Calibration:
    """Read a calibration file.

    Args:
        path: JSON file of one ``Calibration``.
        expected_sha256: the hash a plan recorded; ``None`` accepts any.

    Raises:
        ClusterError: ``calibration-unreadable``, ``calibration-invalid`` or ``calibration-changed``.
    """
    try:
        calibration = Calibration.model_validate(json.loads(path.read_bytes()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ClusterError(
            "calibration-unreadable", str(problem), where=str(path), next_action="run `shardwright calibrate` again"
        ) from problem
    except ValidationError as problem:
        raise ClusterError(
            "calibration-invalid",
            explain(problem),
            where=str(path),
            next_action="run `shardwright calibrate` again; do not edit the file",
        ) from problem
    found = calibration_digest(calibration)
    if expected_sha256 is not None and found != expected_sha256:
        raise ClusterError(
            "calibration-changed",
            f"the file hashes to {found[:16]}…, the plan was made with {expected_sha256[:16]}…",
            where=str(path),
            next_action="restore the file, or plan again with this one",
        )
    return calibration


def calibration_digest(calibration: Calibration) -> str:
    """The hash that a plan names a calibration by."""
    return sha256_of(calibration)


def rate_at(curve: tuple[CurvePoint, ...], size: Any) -> Any:
    """The rate of a curve at ``size`` (a number or a column): linear in log size between points, flat outside.

    ``None`` for an empty curve.
    """
    if not curve:
        return None
    points = sorted(curve, key=lambda point: point.size)
    logs = np.log(np.maximum(np.asarray(size, dtype=np.float64), 1e-300))
    return np.interp(logs, [math.log(point.size) for point in points], [point.rate for point in points])[()]
