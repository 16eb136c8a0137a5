"""Settings that could only train nonsense are refused where the recipe is read, with what was found."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from shardwright.schemas.recipe import Recipe

DATA = {"train": "a", "held_out": "b"}


def recipe(section: str, **settings: Any) -> Recipe:
    return Recipe.model_validate({"data": DATA, section: settings})


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("lora", "alpha", "0"),
        ("lora", "alpha", "-4"),
        ("lora", "dropout", "1"),
        ("lora", "dropout", "-0.1"),
        ("optimizer", "learning_rate", "0"),
        ("optimizer", "learning_rate", "-0.001"),
        ("optimizer", "beta1", "1"),
        ("optimizer", "beta2", "-0.1"),
        ("optimizer", "epsilon", "0"),
        ("optimizer", "weight_decay", "-0.1"),
        ("optimizer", "max_grad_norm", "-1"),
        ("schedule", "final_fraction", "1.5"),
        ("schedule", "final_fraction", "-0.1"),
    ],
)
def test_what_cannot_train_is_refused_by_its_name(section: str, key: str, value: str) -> None:
    with pytest.raises(ValidationError, match=rf"{key}.*\(got .*{value}"):
        recipe(section, **{key: value})


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("lora", {"dropout": 0.99, "alpha": "0.5"}),
        ("optimizer", {"beta1": 0, "beta2": "0.9999", "weight_decay": 0, "max_grad_norm": 0}),
        ("schedule", {"final_fraction": 0}),
        ("schedule", {"final_fraction": 1}),
    ],
)
def test_the_edges_are_taken(section: str, settings: dict[str, Any]) -> None:
    assert recipe(section, **settings)
