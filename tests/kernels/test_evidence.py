"""Measured times are found for exactly what they were measured for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.kernels.evidence import EvidenceStore, shape_bucket
from shardwright.schemas.errors import KernelError
from shardwright.schemas.ops import MeasuredTime

SHA = "a" * 64


def time(**changes: object) -> MeasuredTime:
    facts: dict[str, object] = {
        "op": "rms_norm",
        "provider": "shardwright",
        "pass_name": "fwd",
        "device": "NVIDIA H200",
        "driver": "580",
        "versions": {"triton": "3.6.0"},
        "source_sha256": SHA,
        "shape_bucket": "H7168,T16384",
        "dtype": "bfloat16",
        "median_ms": 0.12,
        "floor_ms": 0.109,
        "peak_bytes": 1,
        "repeats": 3,
        "date": "2026-11-29",
    }
    return MeasuredTime.model_validate({**facts, **changes})


def test_what_was_added_is_found(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path / "deep" / "times.jsonl")
    assert store.read() == ()
    store.add([time(), time(provider="eager", median_ms=1.4)])
    found = store.lookup("rms_norm", "eager", "fwd", "NVIDIA H200", "H7168,T16384", SHA)
    assert found is not None and found.median_ms == 1.4


@pytest.mark.parametrize(
    "other",
    [
        {"op": "add_rms_norm"},
        {"provider": "compile"},
        {"pass_name": "bwd"},
        {"device": "NVIDIA H100"},
        {"shape_bucket": "H7168,T8192"},
        {"source_sha256": "b" * 64},
        {"dtype": "float32"},
    ],
)
def test_anything_else_is_no_evidence(tmp_path: Path, other: dict[str, str]) -> None:
    store = EvidenceStore(tmp_path / "times.jsonl")
    store.add([time()])
    key = {
        "op": "rms_norm",
        "provider": "shardwright",
        "pass_name": "fwd",
        "device": "NVIDIA H200",
        "shape_bucket": "H7168,T16384",
        "source_sha256": SHA,
        "dtype": "bfloat16",
    }
    assert store.lookup(**key) is not None
    assert store.lookup(**{**key, **other}) is None


def test_a_new_time_replaces_the_old_and_order_does_not_matter(tmp_path: Path) -> None:
    one, two = EvidenceStore(tmp_path / "1.jsonl"), EvidenceStore(tmp_path / "2.jsonl")
    one.add([time(median_ms=0.2)])
    one.add([time(provider="eager"), time(median_ms=0.1)])
    two.add([time(median_ms=0.1), time(provider="eager")])
    assert one.path.read_bytes() == two.path.read_bytes()
    assert len(one.read()) == 2


def test_a_corrupt_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "times.jsonl"
    EvidenceStore(path).add([time()])
    path.write_text(path.read_text() + '{"op": "rms_norm"}\n')
    with pytest.raises(KernelError) as caught:
        EvidenceStore(path).read()
    assert caught.value.code == "kernel/corrupt-evidence" and caught.value.where.endswith(":2")


@given(T=st.integers(0, 1 << 24), H=st.integers(1, 1 << 15))
def test_buckets_round_rows_up_and_keep_widths(T: int, H: int) -> None:
    width, rows = shape_bucket({"T": T, "H": H}).split(",")
    assert width == f"H{H}"
    top = int(rows.removeprefix("T"))
    assert top >= T and top & (top - 1) == 0 and (top // 2 < max(T, 1) or T == 0)
