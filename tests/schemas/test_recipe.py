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
        ("schedule", {"steps": 1}),
        ("schedule", {"steps": 4, "warmup_steps": 3}),
        ("schedule", {"early_stop_evaluations": 1, "evaluate_every_steps": 1}),
        ("balance", {"auxiliary": "0", "sequence": "0.001", "target_load": "1.01", "bias_rate": 1}),
    ],
)
def test_the_edges_are_taken(section: str, settings: dict[str, Any]) -> None:
    assert recipe(section, **settings)


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        ("lora", {"targets": []}, "at least one target"),
        ("lora", {"targets": ["attention", " "]}, "at least one target"),
        ("schedule", {"steps": 4, "warmup_steps": 4}, "warmup_steps must be smaller"),
        ("schedule", {"early_stop_evaluations": 1}, "needs evaluate_every_steps"),
        ("balance", {"auxiliary": "-0.1"}, "coefficients are 0 or more"),
        ("balance", {"sequence": "-0.1"}, "coefficients are 0 or more"),
        ("balance", {"target_load": 1}, "target_load is above 1"),
        ("balance", {"bias_rate": 0}, "bias_rate is above 0"),
        ("balance", {"bias_rate": "1.01"}, "bias_rate is above 0"),
    ],
)
def test_what_does_not_go_together_is_refused(section: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(section, **settings)


def test_tokens_of_a_step_are_a_product() -> None:
    assert recipe("batch", sequence_tokens=48, global_batch_sequences=5).batch.tokens_per_step == 240


@pytest.mark.parametrize(
    ("settings", "active"),
    [
        ({}, False),
        ({"auxiliary": "0.01"}, True),
        ({"sequence": "0.0001"}, True),
        ({"target_load": 2, "bias": "sign"}, False),
    ],
)
def test_either_coefficient_adds_a_loss(settings: dict[str, Any], active: bool) -> None:
    assert recipe("balance", **settings).balance.active is active


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({}, False),
        ({"document_mask": True}, True),
        ({"images_field": "images"}, True),
        ({"format": "jsonl-messages"}, True),
        ({"format": "jsonl-messages", "packing": False}, False),
        ({"document_mask": True, "packing": False}, False),
    ],
)
def test_documents_share_rows_where_rows_hold_several_apart(settings: dict[str, Any], shared: bool) -> None:
    assert Recipe.model_validate({"data": {**DATA, **settings}}).data.documents_share_rows is shared
