"""Calibration files by path and hash."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.schemas.canonical import pretty_bytes
from shardwright.schemas.cluster import Calibration, CurvePoint
from shardwright.schemas.errors import ClusterError
from shardwright.search_spaces.calibration import calibration_digest, load_calibration, rate_at

CURVE = (CurvePoint(size=1e3, rate=1e9), CurvePoint(size=1e5, rate=3e9))


def test_a_file_is_read_and_held_to_its_hash(tmp_path: Path) -> None:
    calibration = Calibration(device="cpu-rank", versions={"torch": "2.13"}, copy_bytes_per_s=CURVE)
    path = tmp_path / "calibration.json"
    path.write_bytes(pretty_bytes(calibration))
    assert load_calibration(path, calibration_digest(calibration)) == calibration
    with pytest.raises(ClusterError) as error:
        load_calibration(path, "0" * 64)
    assert error.value.code == "cluster/calibration-changed"


@pytest.mark.parametrize(
    ("text", "code"),
    [("{", "calibration-unreadable"), ('{"device": "x"}', "calibration-invalid"), (None, "calibration-unreadable")],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str | None, code: str) -> None:
    path = tmp_path / "calibration.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ClusterError) as error:
        load_calibration(path)
    assert error.value.code == f"cluster/{code}"


def test_rates_between_points_are_linear_in_log_size() -> None:
    assert rate_at(CURVE, 1e4) == pytest.approx(2e9)
    assert rate_at(CURVE, 1) == 1e9 and rate_at(CURVE, 1e9) == 3e9
    assert rate_at((), 5) is None
