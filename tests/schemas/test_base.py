"""Decimal text and closed models."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from shardwright.schemas.base import DecimalText, Model, added, snake
from shardwright.schemas.recipe import DataSpec, LoraSpec, Recipe

adapter: TypeAdapter[str] = TypeAdapter(DecimalText)


@pytest.mark.parametrize(
    ("given_", "text"),
    [(1e-4, "0.0001"), ("1E-4", "0.0001"), (2, "2"), ("2.50", "2.5"), (0.1, "0.1"), ("-0", "0"), (1e3, "1000")],
)
def test_one_number_has_one_text(given_: object, text: str) -> None:
    assert adapter.validate_python(given_) == text


@given(st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) > 1e-12))
def test_text_keeps_the_value(value: float) -> None:
    assert float(adapter.validate_python(value)) == value
    assert Decimal(adapter.validate_python(value)) == Decimal(repr(value))


@pytest.mark.parametrize("bad", ["one", True, float("nan"), "1,5", ""])
def test_what_is_no_number_is_refused(bad: object) -> None:
    with pytest.raises(ValidationError):
        adapter.validate_python(bad)


def test_unknown_keys_and_changes_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        LoraSpec(ranks=4)  # type: ignore[call-arg]
    recipe = Recipe(data=DataSpec(train="a", held_out="b"))
    with pytest.raises(ValidationError, match="frozen"):
        recipe.name = "other"  # type: ignore[misc]


def test_snake() -> None:
    assert snake("AdaptationPlan") == "adaptation_plan"


class Inner(Model):
    old: int = 1
    new: int = added(0)


class Outer(Model):
    table: dict[str, Inner]
    row: tuple[Inner, ...] = ()


@pytest.mark.parametrize(("value", "written"), [(0, {"old": 1}), (2, {"old": 1, "new": 2})])
def test_a_field_that_joined_is_written_only_off_its_default(value: int, written: dict[str, int]) -> None:
    """So a file of before is written again byte for byte."""
    assert Inner(new=value).model_dump(mode="json") == written
    whole = {"old": 1, "new": value}
    outer = Outer(table={"a": Inner(new=value)}, row=(Inner(new=value),))
    assert outer.whole() == {"table": {"a": whole}, "row": [whole]}
