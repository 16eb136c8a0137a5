"""Canonical bytes: one value, one byte string."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.schemas.canonical import canonical_bytes, pretty_bytes, round_significant, sha256_file, sha256_of
from shardwright.schemas.errors import PlanError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(max_size=8) | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def test_known_bytes_and_hash() -> None:
    value = {"b": [1, 2.5, None], "a": "é", "c": {"z": True}}
    assert canonical_bytes(value) == '{"a":"é","b":[1,2.5,null],"c":{"z":true}}'.encode()
    assert sha256_of(value) == hashlib.sha256('{"a":"é","b":[1,2.5,null],"c":{"z":true}}'.encode()).hexdigest()


@given(json_values)
def test_reading_back_gives_the_same_bytes(value: object) -> None:
    once = canonical_bytes(value)
    assert canonical_bytes(json.loads(once)) == once
    assert canonical_bytes(json.loads(pretty_bytes(value))) == once


@given(st.dictionaries(st.text(max_size=5), st.integers(), max_size=6))
def test_key_order_does_not_matter(value: dict[str, int]) -> None:
    assert canonical_bytes(dict(reversed(list(value.items())))) == canonical_bytes(value)


@pytest.mark.parametrize(("value", "rounded"), [(1234567.0, 1234570.0), (0.123456789, 0.123457), (-5e-9, -5e-9)])
def test_six_significant_digits(value: float, rounded: float) -> None:
    assert round_significant(value) == rounded


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_canonical_form_for_nan(bad: float) -> None:
    with pytest.raises(PlanError, match="plan/not-finite"):
        canonical_bytes({"x": bad})


def test_decision_bytes_refuse_binary_floats_and_name_the_field() -> None:
    with pytest.raises(PlanError) as caught:
        canonical_bytes({"recipe": {"rate": 0.1}}, floats=False)
    assert caught.value.code == "plan/decision-float"
    assert caught.value.where == "$.recipe.rate"


def test_pretty_bytes_are_sorted_indented_and_as_written() -> None:
    assert pretty_bytes({"b": [1.23456789], "a": "é"}) == '{\n  "a": "é",\n  "b": [\n    1.23457\n  ]\n}\n'.encode()


@pytest.mark.parametrize("size", [0, 3, (1 << 22) + 1])
def test_a_files_hash_is_that_of_all_its_bytes(tmp_path: Path, size: int) -> None:
    """A piece of reading is 4 MiB: the last size takes two."""
    data = bytes(i % 251 for i in range(997)) * (size // 997 + 1)
    (tmp_path / "file").write_bytes(data[:size])
    assert sha256_file(tmp_path / "file") == hashlib.sha256(data[:size]).hexdigest()
