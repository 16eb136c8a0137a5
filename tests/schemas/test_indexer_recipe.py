"""What a recipe says of the indexers of sparse attention: off by default, unwritten while off, sensible together."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shardwright.schemas.recipe import DataSpec, IndexerSpec, Recipe


def test_a_recipe_of_before_is_written_as_before() -> None:
    plain = Recipe(data=DataSpec(train="a", held_out="b"))
    assert "indexer" not in plain.model_dump()
    asked = plain.model_copy(update={"indexer": IndexerSpec(loss="0.1", stage="dense")})
    assert asked.model_dump()["indexer"] == {"loss": "0.1", "stage": "dense"}
    assert Recipe.model_validate(asked.model_dump()) == asked


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": "-1"}, "0 or more"),
        ({"stage": "dense"}, "set indexer.loss above 0"),
        ({"loss": "1", "stage": "dense", "scores": "fp8"}, "selects no keys"),
        ({"loss": "1", "attention": "faster"}, "needs indexer.loss 0"),
        ({"scores": "fp4"}, "'exact' or 'fp8'"),
        ({"stage": "warm"}, "'sparse' or 'dense'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        IndexerSpec.model_validate(settings)


def test_settings_that_agree_are_taken() -> None:
    for settings in ({"scores": "fp8", "loss": "1"}, {"scores": "fp8", "attention": "faster"}, {"loss": "1"}):
        assert IndexerSpec.model_validate(settings).model_dump() == {"loss": "0", **settings}
